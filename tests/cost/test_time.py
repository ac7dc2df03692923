"""The least time: devices by name with their sources, and each kernel at peak or bandwidth."""

from fractions import Fraction

import pytest

from qkv.config import GPTConfig, preset
from qkv.cost import Launch, Phase, Precision, Product, Workload, estimate
from qkv.cost.devices import DEVICES, find_device
from qkv.cost.time import Bound, bound
from qkv.errors import InputError

CONFIG = GPTConfig(vocab_size=101, context_length=64, d_model=24, n_heads=3, n_layers=2)


def launch(**changes):
    given = {
        "part": "p", "name": "n", "phase": Phase.FORWARD, "runs": 3,
        "products": (Product(rows=7, inner=11, columns=13),), "bytes_read": 500, "bytes_written": 100,
    }  # fmt: skip
    return Launch(**{**given, **changes})


def test_every_device_of_the_table_names_its_source():
    assert {"a100", "h100", "h200", "b200", "l4", "rtx4090", "mi300x", "cpu"} == DEVICES.keys()
    assert all(device.source for device in DEVICES.values())


@pytest.mark.parametrize("written", ["H200", "h200", "RTX 4090", "rtx-4090", "MI300X"])
def test_a_device_is_found_however_it_is_written(written):
    assert find_device(written).name == written.lower().replace(" ", "").replace("-", "")


def test_an_unknown_device_is_named_with_the_nearest_one():
    with pytest.raises(InputError, match=r"unknown device 'h2000'; did you mean 'h200'\?; known: a100"):
        find_device("h2000")


def test_a_kernel_takes_the_longer_of_its_work_and_its_traffic():
    device = DEVICES["h200"]
    work = Workload(batch=1, length=1, dtype=Precision.BFLOAT16)
    flops, moved = 3 * 2 * 7 * 11 * 13, 3 * 600
    roof = Bound(device=device, work=work, launches=())
    assert roof.of(launch()) == max(flops / device.half, moved / device.bandwidth) == moved / device.bandwidth
    large = launch(products=(Product(rows=7000, inner=11000, columns=13000),))
    assert roof.of(large) == large.flops / device.half
    assert [roof.what_bounds(one) for one in (launch(), large)] == ["memory", "compute"]


def test_a_fused_kernel_leaves_out_what_the_mask_hides():
    roof = Bound(device=DEVICES["cpu"], work=Workload(batch=1, length=1), launches=())
    products = (Product(rows=4096, inner=64, columns=4096),) * 2
    whole, half = (launch(products=products, visible=visible) for visible in (Fraction(1), Fraction(1, 2)))
    assert roof.of(half) == roof.of(whole) / 2


def test_the_bound_of_a_step_is_the_sum_of_its_kernels_and_grows_with_training():
    device = DEVICES["a100"]
    forward, train = (
        bound(estimate(CONFIG, batch=5, length=17, mode=mode, dtype="float32"), device) for mode in ("forward", "train")
    )
    assert forward.seconds == sum(forward.of(one) for one in forward.launches)
    assert train.seconds > 2 * forward.seconds
    assert 0 <= train.share_computing <= 1


def test_large_products_are_bound_by_compute_and_decoding_by_memory():
    device = find_device("h200")
    train, decode = (
        bound(estimate(preset("gpt2"), batch=8, length=1024, mode=mode, dtype="bfloat16"), device)
        for mode in ("prefill", "decode")
    )
    assert train.share_computing > 0.5
    assert decode.share_computing == 0
