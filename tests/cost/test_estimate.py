"""Estimates: repr, plain data, rows, and errors for invalid workloads."""

import json
import re
import subprocess
import sys

import pytest

from qkv.config import GPTConfig, preset
from qkv.cost import Workload, estimate, estimate_run
from qkv.cost.estimate import CONVENTIONS, format_bytes, format_count, format_duration, format_flops
from qkv.errors import ConfigError, ContextLengthError

GPT2 = preset("gpt2")


def test_the_repr_contains_title_totals_and_conventions():
    text = repr(estimate(GPT2, batch_size=1, seq_len=1024, kernel="eager", mode="train"))
    assert text.startswith("gpt · train · 1×1,024 tokens · float32 · eager attention\n")
    assert re.search(r"total +124,439,808", text)
    assert "291,648,307,200  292 GFLOP" in text
    assert CONVENTIONS in text


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "t5-small", "rnn-nano"])
def test_as_dict_is_plain_data_with_the_same_numbers(name):
    result = estimate(preset(name), batch_size=2, seq_len=16, mode="train")
    data = json.loads(json.dumps(result.as_dict()))
    assert data["parameters"]["total"] == result.parameters.total
    assert data["flops"]["total"] == result.flops.total
    assert data["memory"]["peak"] == result.memory.peak
    assert data["workload"]["mode"] == "train"


def test_rows_add_up_to_the_totals():
    result = estimate(
        preset("t5-small"), batch_size=2, seq_len=16, source_len=11, activation_checkpointing=True, mode="train"
    )
    rows = result.operation_rows()
    assert sum(row["parameters"] for row in rows) == result.parameters.total
    assert sum(row["flops"] for row in rows) == result.flops.forward
    assert sum(row["useful_flops"] for row in rows) == result.flops.useful_forward
    assert (
        sum(row["backward_flops"] + row["recomputed_flops"] for row in rows)
        == result.flops.total - result.flops.forward
    )
    assert sum(row["bytes_fused"] for row in rows) == result.traffic.forward_fused


@pytest.mark.parametrize(
    "name",
    ["batch_size", "seq_len", "source_len", "loss_chunk_size", "accumulation_steps", "logits_to_keep", "n_devices"],
)
@pytest.mark.parametrize("size", [0, -3, 1.5, 10**30, "many", True, float("nan")])
def test_an_invalid_size_is_a_one_line_error(name, size):
    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        Workload(**{"batch_size": 1, "seq_len": 1, "mode": "train", name: size})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "values"),
    [
        ("gpt2", {"seq_len": 1025}, r"^seq_len .*context_length=1024, got 1025$"),
        ("t5-small", {"seq_len": 1, "source_len": 513}, r"^source_len .*context_length=512, got 513$"),
        ("gpt2", {"seq_len": 1, "source_len": 3}, r"^source_len .*\bgpt\b.*, got 3$"),
        ("bert-tiny", {"seq_len": 1, "mode": "decode"}, r"^mode=decode\b.*\bbert\b"),
        ("gpt2", {"seq_len": 1, "mode": "dream"}, "^mode='dream'"),
        ("gpt2", {"seq_len": 1, "mode": "generate"}, "^n_new_tokens.*mode=generate and n_new_tokens=None$"),
        ("gpt2", {"seq_len": 1, "n_new_tokens": 3}, "^n_new_tokens.*mode=forward and n_new_tokens=3$"),
        ("gpt2", {"seq_len": 1, "mode": "generate", "n_new_tokens": 0}, "^n_new_tokens=0: "),
        ("bert-tiny", {"seq_len": 7, "logits_to_keep": 8}, r"^logits_to_keep .*\b7\b.*, got 8$"),
        ("gpt2", {"seq_len": 1, "mode": "decode", "n_devices": 2}, "^n_devices .*mode=train.*mode=decode"),
        (
            "gpt2",
            {"seq_len": 1, "mode": "decode", "activation_checkpointing": True},
            "^activation_checkpointing .*mode=train.*mode=decode",
        ),
    ],
)
def test_a_workload_that_the_model_does_not_support_is_an_error(name, settings, values):
    with pytest.raises((ConfigError, ContextLengthError), match=values):
        estimate(preset(name), batch_size=1, **settings)


def test_a_non_causal_gpt_has_no_decode_step():
    with pytest.raises(ConfigError, match=r"^mode=decode .*causal=False"):
        estimate(preset("gpt-nano", causal=False), batch_size=1, seq_len=1, mode="decode")


def test_sizes_above_1e15_are_an_error_and_other_large_sizes_are_estimated():
    shape = {"vocab_size": 10**6, "context_length": 10**6, "n_heads": 1000}
    with pytest.raises(ConfigError, match=r"^d_ff .*\b1000000000000000, got 4000000000000000000000000000000$"):
        estimate(GPTConfig(**shape, d_model=10**3, d_ff=4 * 10**30, n_layers=1), batch_size=1, seq_len=1)
    result = estimate(GPTConfig(**shape, d_model=10**6, n_layers=100), batch_size=10**6, seq_len=10**6)
    assert result.parameters.total > 10**15
    assert "EiB" in repr(result)


def test_the_summary_of_a_run_has_parameters_memory_flops_and_time():
    run = estimate_run(GPT2, batch_size=64, seq_len=256, steps=5000, matmul_rate=8e14)
    peak, total = format_bytes(run.step.memory.peak), format_flops(run.flops)
    assert run.flops == 5000 * run.step.flops.total
    assert run.summary == (
        f"124M parameters · {peak} for a step of 64×256 · {total} in 5,000 steps · "
        f"about {format_duration(run.flops / 2.4e14)} at 30 % of 800 TFLOP/s"
    )


def test_a_run_counts_accumulated_batches_and_has_no_time_without_a_rate():
    once = estimate_run(GPT2, batch_size=4, seq_len=256, steps=10)
    accumulated = estimate_run(GPT2, batch_size=4, seq_len=256, steps=10, accumulation_steps=8)
    assert accumulated.flops == 8 * once.flops
    assert "a step of 8×4×256" in accumulated.summary
    assert "about" not in once.summary
    assert once.seconds is None
    assert "7×16 from 11" in estimate_run(preset("t5-small"), batch_size=7, seq_len=16, source_len=11, steps=3).summary


@pytest.mark.parametrize(
    "invalid",
    [
        {"steps": 0},
        {"steps": 10**30},
        {"matmul_rate": 0.0},
        {"matmul_rate": float("inf")},
        {"utilization": 0.0},
        {"utilization": 1.1},
    ],
)
def test_an_invalid_setting_of_a_run_is_named_in_the_error(invalid):
    (name,) = invalid
    with pytest.raises(ConfigError, match=f"^{name} must "):
        estimate_run(GPT2, **{"batch_size": 1, "seq_len": 8, "steps": 1, **invalid})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(999), "999"),
        (format_count(10_650_000), "10.7M"),
        (format_count(8_030_261_248), "8.0B"),
        (format_count(2 * 10**15), "2,000T"),
        (format_bytes(1023), "1,023 B"),
        (format_bytes(1024), "1.0 KiB"),
        (format_bytes(int(1.3 * 2**30)), "1.3 GiB"),
        (format_flops(2.1e15), "2.1 PFLOP"),
        (format_flops(800e12), "800 TFLOP"),
        (format_duration(0.2), "under 1 s"),
        (format_duration(45), "45 s"),
        (format_duration(170), "2.8 min"),
        (format_duration(3600 * 5.2), "5.2 h"),
        (format_duration(86400 * 12), "12 days"),
        (format_duration(31_557_600 * 3000), "3,000 years"),
    ],
)
def test_numbers_are_formatted_with_units(text, expected):
    assert text == expected


def test_peak_and_bandwidth_must_be_passed_together():
    with pytest.raises(ConfigError, match=r"peak=1000000000000000.0 and bandwidth=None"):
        estimate("gpt2", seq_len=8, mode="train").operation_rows(peak=1e15)


def test_the_masked_lm_head_is_counted_only_for_predicted_positions():
    config = preset("bert-tiny", masked_lm_head=True, pooler=False)
    all_positions, some = (
        estimate(config, batch_size=3, seq_len=128, logits_to_keep=n, mode="train") for n in (None, 20)
    )
    head = 2 * config.d_model * (config.d_model + config.vocab_size)
    assert all_positions.flops.forward - some.flops.forward == 3 * (128 - 20) * head
    logits = 4 * 3 * 128 * config.vocab_size
    assert all_positions.memory.activations - some.memory.activations > logits * 4 // 5


def test_estimates_do_not_import_torch():
    code = "import sys; import qkv;qkv.estimate('gpt2', batch_size=1, seq_len=8); assert 'torch' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
