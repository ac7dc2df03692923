"""The most memory that a training step holds, predicted from the config, is what torch holds."""

from dataclasses import replace

import pytest

from benchmarks.memory import CPU_LIMIT, MIB, ON_CPU, ON_GPU, measured, predicted

QUICK = ("gpt, chunked", "t5", "bert")
ON_AN_H200 = {
    "GPT-2 124M": 17_024.0,
    "GPT-2 124M, chunked loss": 16_582.7,
    "GPT-2 medium, checkpointing": 8_169.2,
    "BERT-base, 77 masked words a row": 8_256.7,
    "GPT-2 124M, float32, plain": 10_800.4,
    "Llama-like, Muon, averaged": 6_371.0,
    "GPT-2 124M, one short row": 2_113.1,
}
"""MiB, measured once (benchmarks/RESULTS.md, 2026-11-16)."""
T5_ON_AN_H200 = 6_703.0
"""On the same day, when its encoder's bias lay so that torch gave up the fused kernel."""


def name_of(case):
    return case.name


@pytest.mark.parametrize("case", [case for case in ON_CPU if case.name in QUICK], ids=name_of)
def test_the_peak_of_a_step_on_a_cpu(case):
    assert predicted(case, "cpu") == pytest.approx(measured(case, "cpu"), rel=CPU_LIMIT)


@pytest.mark.parametrize("case", [case for case in ON_GPU if case.name in ON_AN_H200], ids=name_of)
def test_the_peak_of_a_step_on_a_gpu_is_what_was_once_measured(case):
    assert predicted(case, "cuda") / MIB == pytest.approx(ON_AN_H200[case.name], rel=0.01)


def test_what_t5_once_held_on_a_gpu_is_the_fused_road_and_its_encoders_plain_attention_at_32_bits():
    """Six layers kept softmax's n×n weights and Q, K, V at 32 bits, in place of Q, K, V, bias and row sums."""
    (t5,) = (case for case in ON_GPU if case.name == "T5-small")
    batch, n, heads, width = 32, 512, 8, 512
    plain = 4 * batch * heads * n * n + 3 * 4 * batch * n * width
    fused = 3 * 2 * batch * n * width + 2 * heads * n * n + 4 * batch * heads * n
    assert (predicted(t5, "cuda") + 6 * (plain - fused)) / MIB == pytest.approx(T5_ON_AN_H200, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
@pytest.mark.parametrize("case", ON_CPU, ids=name_of)
def test_the_peak_of_every_kind_of_step_on_a_cpu(case, dtype):
    case = replace(case, work={**case.work, "dtype": dtype})
    assert predicted(case, "cpu") == pytest.approx(measured(case, "cpu"), rel=CPU_LIMIT)
