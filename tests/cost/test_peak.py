"""The most memory that a training step holds, predicted from the config, is what torch holds."""

from dataclasses import replace

import pytest

from benchmarks.memory import CPU_LIMIT, ON_CPU, measured, predicted

QUICK = ("gpt, chunked", "t5", "bert")


def name_of(case):
    return case.name


@pytest.mark.parametrize("case", [case for case in ON_CPU if case.name in QUICK], ids=name_of)
def test_the_peak_of_a_step_on_a_cpu(case):
    assert predicted(case, "cpu") == pytest.approx(measured(case, "cpu"), rel=CPU_LIMIT)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
@pytest.mark.parametrize("case", ON_CPU, ids=name_of)
def test_the_peak_of_every_kind_of_step_on_a_cpu(case, dtype):
    case = replace(case, work={**case.work, "dtype": dtype})
    assert predicted(case, "cpu") == pytest.approx(measured(case, "cpu"), rel=CPU_LIMIT)
