"""Training plans: model shape, largest batch size, time and cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import preset
from qkv.cost import Mode, Precision, Sharding, Workload, count_parameters, estimate
from qkv.cost.devices import find_device
from qkv.cost.training_plan import gpt_config_for_size, max_batch_size, plan_training
from qkv.cost.workload import DeviceType
from qkv.errors import InputError

H200, L4 = find_device("h200"), find_device("l4")


def test_the_config_for_124m_parameters_is_gpt2():
    assert gpt_config_for_size(124_000_000) == preset("gpt2")


@given(st.integers(10**6, 10**15))
def test_a_gpt_config_of_any_size_is_close_to_the_requested_size(n):
    config = gpt_config_for_size(n)
    assert count_parameters(config).total == pytest.approx(n, rel=0.25)
    assert 20 <= config.d_model / config.n_layers <= 260


@pytest.mark.parametrize("n", [0, 999_999, 10**30])
def test_sizes_out_of_range_are_an_error(n):
    with pytest.raises(InputError, match=rf"^params .*\b1000000\b.*, got {n}$"):
        gpt_config_for_size(n)


def test_the_maximum_batch_size_fits_and_one_more_does_not():
    config, memory = preset("gpt2"), L4.usable_memory
    workload = Workload(batch_size=1, seq_len=256, mode=Mode.TRAIN, dtype=Precision.MIXED)
    batch_size = max_batch_size(config, workload, memory=memory)
    peaks = [
        estimate(config, batch_size=n, seq_len=256, mode="train", dtype="mixed").memory.peak
        for n in (batch_size, batch_size + 1)
    ]
    assert peaks[0] <= memory < peaks[1]
    assert max_batch_size(config, workload, memory=1e9) == 0


def test_a_plan_covers_all_tokens_and_respects_its_bound():
    result = plan_training(preset("gpt2"), tokens=2_500_000_000, device=H200, price=3.5)
    tokens_per_step = result.batch_size * 1024
    assert result.steps * tokens_per_step >= 2_500_000_000 > (result.steps - 1) * tokens_per_step
    assert result.seconds == pytest.approx(result.flops / (0.4 * H200.half))
    assert result.seconds >= result.bound_seconds
    assert result.cost == pytest.approx(3.5 * result.seconds / 3600)
    # 6 FLOPs per parameter and token plus attention: about 7 at this length.
    assert 6 < result.flops / (2.5e9 * 124_439_808) < 7.6


def test_a_plan_for_a_cpu_uses_float32_and_no_cublas_workspace():
    result = plan_training(preset("gpt-nano"), tokens=10**6, device=find_device("cpu"))
    assert (result.step.workload.device_type, result.step.workload.dtype) == (DeviceType.CPU, Precision.FLOAT32)
    assert result.step.memory.cublas_workspace == 0


def test_eight_devices_take_an_eighth_of_the_time_and_cost_the_same():
    single, eight = (plan_training(preset("gpt2"), tokens=10**9, device=H200, n_devices=n, price=2.0) for n in (1, 8))
    assert eight.seconds == pytest.approx(single.seconds / 8, rel=0.05)
    assert eight.cost == pytest.approx(single.cost, rel=0.05)


def test_a_model_too_large_for_one_device_fits_with_fsdp():
    config = gpt_config_for_size(7_000_000_000)
    single = plan_training(config, tokens=10**9, device=find_device("h100"))
    assert not single.fits
    assert single.batch_size == 0
    sharded = plan_training(config, tokens=10**9, device=find_device("h100"), n_devices=16, sharding=Sharding.FSDP)
    assert sharded.fits


def test_the_time_is_the_largest_of_compute_kernels_and_communication():
    many = {"n_devices": 64, "sharding": Sharding.FSDP}
    plans = {
        "compute": plan_training(preset("gpt2"), tokens=10**9, device=H200),
        "communication": plan_training(gpt_config_for_size(70 * 10**9), tokens=10**12, device=H200, **many),
        "kernels": plan_training(gpt_config_for_size(400 * 10**9), tokens=10**12, device=H200),
    }
    for name, plan in plans.items():
        assert (plan.bound_by, plan.as_dict()["bound_by"]) == (name, name)
        times = {
            "compute": plan.compute_seconds,
            "kernels": plan.kernel_seconds,
            "communication": plan.communication_seconds,
        }
        assert plan.seconds == times[name] == max(times.values())


def test_weight_casts_are_blocking_only_if_they_prevent_fitting():
    assert (
        plan_training(gpt_config_for_size(70 * 10**9), tokens=10**9, device=H200).weight_cast_bytes_preventing_fit
        > H200.usable_memory
    )
    assert plan_training(preset("gpt2"), tokens=10**9, device=H200).weight_cast_bytes_preventing_fit == 0


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"tokens": 0}, "^tokens .*, got 0$"),
        ({"tokens": 10**30}, "^tokens .*, got 1000000000000000000000000000000$"),
        ({"utilization": 0.0}, "^utilization .*, got 0.0$"),
        ({"utilization": 1.5}, "^utilization .*, got 1.5$"),
        ({"price": -1.0}, "^price .*, got -1.0$"),
    ],
)
def test_invalid_settings_are_named_in_the_error(changes, values):
    with pytest.raises(InputError, match=values):
        plan_training(preset("gpt2"), **{"tokens": 10**9, "device": H200, **changes})
