"""A run planned: the shape of so many parameters, the batch that fits, time, money."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import preset
from qkv.cost import Mode, Precision, Sharding, Workload, estimate, parameters
from qkv.cost.devices import find_device
from qkv.cost.plan import gpt_of, largest_batch, plan
from qkv.cost.workload import Backend
from qkv.errors import InputError

H200, L4 = find_device("h200"), find_device("l4")


def test_124m_parameters_are_gpt2():
    assert gpt_of(124_000_000) == preset("gpt2")


@given(st.integers(10**6, 10**15))
def test_a_gpt_of_any_size_is_found_and_comes_near(n):
    config = gpt_of(n)
    assert parameters(config).total == pytest.approx(n, rel=0.25)
    assert 20 <= config.d_model / config.n_layers <= 260


@pytest.mark.parametrize("n", [0, 999_999, 10**30])
def test_sizes_that_no_gpt_has_are_refused(n):
    with pytest.raises(InputError, match=rf"params={n} must be from 1000000 to"):
        gpt_of(n)


def test_the_batch_that_fits_fits_and_one_more_does_not():
    config, memory = preset("gpt2"), L4.usable
    work = Workload(batch=1, length=256, mode=Mode.TRAIN, dtype=Precision.MIXED)
    batch = largest_batch(config, work, memory=memory)
    held = [estimate(config, batch=b, length=256, mode="train", dtype="mixed").memory.peak for b in (batch, batch + 1)]
    assert held[0] <= memory < held[1]
    assert largest_batch(config, work, memory=1e9) == 0


def test_a_plan_works_through_all_tokens_and_never_beats_its_bound():
    found = plan(preset("gpt2"), tokens=2_500_000_000, device=H200, price=3.5)
    a_step = found.batch * 1024
    assert found.steps * a_step >= 2_500_000_000 > (found.steps - 1) * a_step
    assert found.seconds == pytest.approx(found.flops / (0.4 * H200.half))
    assert found.seconds >= found.at_least
    assert found.money == pytest.approx(3.5 * found.seconds / 3600)
    # 6 FLOPs a parameter and token, and attention's: about 7 in all at this length.
    assert 6 < found.flops / (2.5e9 * 124_439_808) < 7.6


def test_a_cpu_is_planned_by_its_own_rules():
    found = plan(preset("gpt-nano"), tokens=10**6, device=find_device("cpu"))
    assert (found.step.work.backend, found.step.work.dtype) == (Backend.CPU, Precision.FLOAT32)
    assert found.step.memory.workspace == 0


def test_eight_devices_take_an_eighth_of_the_time_and_cost_the_same():
    one, eight = (plan(preset("gpt2"), tokens=10**9, device=H200, n_devices=n, price=2.0) for n in (1, 8))
    assert eight.seconds == pytest.approx(one.seconds / 8, rel=0.05)
    assert eight.money == pytest.approx(one.money, rel=0.05)


def test_what_one_device_cannot_hold_many_can_share():
    config = gpt_of(7_000_000_000)
    alone = plan(config, tokens=10**9, device=find_device("h100"))
    assert not alone.fits
    assert alone.batch == 0
    shared = plan(config, tokens=10**9, device=find_device("h100"), n_devices=16, sharding=Sharding.FSDP)
    assert shared.fits


def test_the_time_is_the_longest_of_three_and_says_which():
    many = {"n_devices": 64, "sharding": Sharding.FSDP}
    found = {
        "computing": plan(preset("gpt2"), tokens=10**9, device=H200),
        "sending": plan(gpt_of(70 * 10**9), tokens=10**12, device=H200, **many),
        "kernels": plan(gpt_of(400 * 10**9), tokens=10**12, device=H200),
    }
    for name, one in found.items():
        assert (one.bound_by, one.as_dict()["bound_by"]) == (name, name)
        times = {"computing": one.computing, "kernels": one.in_kernels, "sending": one.sending}
        assert one.seconds == times[name] == max(times.values())


def test_casts_are_in_the_way_only_of_what_they_keep_from_fitting():
    assert plan(gpt_of(70 * 10**9), tokens=10**9, device=H200).casts_in_the_way > H200.usable
    assert plan(preset("gpt2"), tokens=10**9, device=H200).casts_in_the_way == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be from 1"),
        ({"tokens": 10**30}, "tokens=1000000000000000000000000000000 must be from 1"),
        ({"share": 0.0}, "share=0.0 must be above 0"),
        ({"share": 1.5}, "share=1.5 must be above 0"),
        ({"price": -1.0}, "price=-1.0 must be 0 or more"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        plan(preset("gpt2"), **{"tokens": 10**9, "device": H200, **changes})
