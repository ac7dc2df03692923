"""Roofline bounds and the table of devices."""

from fractions import Fraction

import pytest

from qkv.config import GPTConfig, preset
from qkv.cost import KernelLaunch, MatMul, Phase, Precision, Workload, estimate
from qkv.cost.devices import DEVICES, RooflineBound, find_device, roofline_bound
from qkv.errors import InputError

CONFIG = GPTConfig(vocab_size=101, context_length=64, d_model=24, n_heads=3, n_layers=2)


def make_launch(**changes):
    defaults = {
        "part": "p",
        "name": "n",
        "phase": Phase.FORWARD,
        "runs": 3,
        "matmuls": (MatMul(rows=7, inner=11, columns=13),),
        "bytes_read": 500,
        "bytes_written": 100,
    }
    return KernelLaunch(**{**defaults, **changes})


def test_every_device_has_a_source():
    assert {"a100", "h100", "h200", "b200", "l4", "rtx4090", "mi300x", "cpu"} == DEVICES.keys()
    assert all(device.source for device in DEVICES.values())


@pytest.mark.parametrize("spelling", ["H200", "h200", "RTX 4090", "rtx-4090", "MI300X"])
def test_devices_are_found_in_any_spelling(spelling):
    assert find_device(spelling).name == spelling.lower().replace(" ", "").replace("-", "")


def test_an_unknown_device_is_an_error_that_suggests_the_closest_name():
    with pytest.raises(InputError, match=r"'h2000'.*'h200'.*a100, h100"):
        find_device("h2000")


def test_a_kernel_takes_the_larger_of_its_compute_and_memory_time():
    device = DEVICES["h200"]
    workload = Workload(batch_size=1, seq_len=1, dtype=Precision.BFLOAT16)
    flops, n_bytes = 3 * 2 * 7 * 11 * 13, 3 * 600
    bound = RooflineBound(device=device, workload=workload, launches=())
    assert (
        bound.kernel_seconds(make_launch())
        == max(flops / device.half, n_bytes / device.bandwidth)
        == n_bytes / device.bandwidth
    )
    large = make_launch(matmuls=(MatMul(rows=7000, inner=11000, columns=13000),))
    assert bound.kernel_seconds(large) == large.flops / device.half
    assert [bound.bound_by(launch) for launch in (make_launch(), large)] == ["memory", "compute"]


def test_a_fused_kernel_skips_masked_pairs():
    bound = RooflineBound(device=DEVICES["cpu"], workload=Workload(batch_size=1, seq_len=1), launches=())
    matmuls = (MatMul(rows=4096, inner=64, columns=4096),) * 2
    full, half = (
        make_launch(matmuls=matmuls, unmasked_fraction=fraction) for fraction in (Fraction(1), Fraction(1, 2))
    )
    assert bound.kernel_seconds(half) == bound.kernel_seconds(full) / 2


def test_the_bound_of_a_step_is_the_sum_of_its_kernels():
    device = DEVICES["a100"]
    forward, train = (
        roofline_bound(estimate(CONFIG, batch_size=5, seq_len=17, mode=mode, dtype="float32"), device)
        for mode in ("forward", "train")
    )
    assert forward.seconds == sum(forward.kernel_seconds(launch) for launch in forward.launches)
    assert train.seconds > 2 * forward.seconds
    assert 0 <= train.compute_bound_fraction <= 1


def test_prefill_is_compute_bound_and_decoding_is_memory_bound():
    device = find_device("h200")
    prefill, decode = (
        roofline_bound(estimate(preset("gpt2"), batch_size=8, seq_len=1024, mode=mode, dtype="bfloat16"), device)
        for mode in ("prefill", "decode")
    )
    assert prefill.compute_bound_fraction > 0.5
    assert decode.compute_bound_fraction == 0
