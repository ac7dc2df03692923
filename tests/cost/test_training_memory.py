"""Peak memory of a training step predicted from the config matches the memory that torch allocates."""

from dataclasses import replace

import pytest

from benchmarks.memory import CPU_CASES, CPU_LIMIT, GPU_CASES, MIB, measure_peak, predict_peak

QUICK_CASES = ("gpt, chunked", "t5", "bert")
H200_PEAK_MIB = {
    "GPT-2 124M": 17_024.0,
    "GPT-2 124M, chunked loss": 16_582.7,
    "GPT-2 medium, checkpointing": 8_169.2,
    "BERT-base, 77 masked tokens per sequence": 8_256.7,
    "GPT-2 124M, float32, eager": 10_800.4,
    "Llama-like, Muon, EMA": 6_371.0,
    "GPT-2 124M, one short sequence": 2_113.1,
}
"""Measured on 2026-11-16 (benchmarks/RESULTS.md)."""
T5_H200_PEAK_MIB = 6_703.0
"""Measured on the same day, with a memory layout of the bias for which torch fell back from the fused kernel."""


def case_name(case):
    return case.name


@pytest.mark.parametrize("case", [case for case in CPU_CASES if case.name in QUICK_CASES], ids=case_name)
def test_the_predicted_cpu_peak_matches_the_measured_one(case):
    assert predict_peak(case, "cpu") == pytest.approx(measure_peak(case, "cpu"), rel=CPU_LIMIT)


@pytest.mark.parametrize("case", [case for case in GPU_CASES if case.name in H200_PEAK_MIB], ids=case_name)
def test_the_predicted_gpu_peak_matches_the_recorded_measurement(case):
    assert predict_peak(case, "cuda") / MIB == pytest.approx(H200_PEAK_MIB[case.name], rel=0.01)


def test_the_recorded_t5_peak_is_explained_by_eager_attention_in_float32_in_the_encoder():
    """Six layers saved the n×n weights and Q, K, V in float32 instead of Q, K, V, bias and row sums."""
    (t5,) = (case for case in GPU_CASES if case.name == "T5-small")
    batch, n, heads, width = 32, 512, 8, 512
    eager = 4 * batch * heads * n * n + 3 * 4 * batch * n * width
    fused = 3 * 2 * batch * n * width + 2 * heads * n * n + 4 * batch * heads * n
    assert (predict_peak(t5, "cuda") + 6 * (eager - fused)) / MIB == pytest.approx(T5_H200_PEAK_MIB, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
@pytest.mark.parametrize("case", CPU_CASES, ids=case_name)
def test_the_predicted_cpu_peak_matches_for_all_cases(case, dtype):
    case = replace(case, settings={**case.settings, "dtype": dtype})
    assert predict_peak(case, "cpu") == pytest.approx(measure_peak(case, "cpu"), rel=CPU_LIMIT)
