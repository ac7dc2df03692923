"""The whole answer: easy to read, plain as data, and clear about what cannot be."""

import json
import subprocess
import sys

import pytest

from qkv.config import GPTConfig, preset
from qkv.cost import Workload, estimate, preflight
from qkv.cost.readable import readable_bytes, readable_count, readable_flops, readable_time
from qkv.errors import ConfigError, ContextLengthError

GPT2 = preset("gpt2")


def test_the_repr_reads_well():
    shown = repr(estimate(GPT2, batch=1, length=1024, kernel="plain", mode="train"))
    assert shown.startswith("gpt · train · 1×1,024 tokens · float32 · plain attention\n")
    assert "total                    124,439,808" in shown
    assert "291,648,307,200  292 GFLOP" in shown
    assert "A multiply–add is 2 FLOPs" in shown


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "t5-small", "rnn-nano"])
def test_as_dict_is_plain_data_with_the_same_numbers(name):
    found = estimate(preset(name), batch=2, length=16, mode="train")
    again = json.loads(json.dumps(found.as_dict()))
    assert again["parameters"]["total"] == found.parameters.total
    assert again["flops"]["total"] == found.flops.total
    assert again["memory"]["peak"] == found.memory.peak
    assert again["work"]["mode"] == "train"


def test_rows_add_up_to_the_totals():
    found = estimate(preset("t5-small"), batch=2, length=16, source_length=11, checkpointing=True, mode="train")
    rows = found.rows()
    assert sum(row["parameters"] for row in rows) == found.parameters.total
    assert sum(row["flops"] for row in rows) == found.flops.forward
    assert sum(row["useful_flops"] for row in rows) == found.flops.useful_forward
    assert (
        sum(row["backward_flops"] + row["recomputed_flops"] for row in rows) == found.flops.total - found.flops.forward
    )
    assert sum(row["bytes_fused"] for row in rows) == found.traffic.fused


@pytest.mark.parametrize(
    "name", ["batch", "length", "source_length", "loss_chunk", "accumulation", "predictions", "n_devices"]
)
@pytest.mark.parametrize("size", [0, -3, 1.5, 10**30, "many", True, float("nan")])
def test_a_size_that_cannot_be_is_one_clear_line(name, size):
    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        Workload(**{"batch": 1, "length": 1, "mode": "train", name: size})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "remark"),
    [
        ("gpt2", {"length": 1025}, "length=1025 is more than the model's context_length=1024"),
        ("t5-small", {"length": 1, "source_length": 513}, "source_length=513 is more than .* context_length=512"),
        ("gpt2", {"length": 1, "source_length": 3}, "source_length=3, but gpt reads no source"),
        ("bert-tiny", {"length": 1, "mode": "decode"}, "mode=decode: bert reads whole sequences"),
        ("gpt2", {"length": 1, "mode": "dream"}, "mode='dream'"),
        ("gpt2", {"length": 1, "mode": "generate"}, "mode=generate needs new.*mode=generate, new=None"),
        ("gpt2", {"length": 1, "new": 3}, "mode=generate needs new.*mode=forward, new=3"),
        ("gpt2", {"length": 1, "mode": "generate", "new": 0}, "new=0: input should be greater than or equal to 1"),
        ("bert-tiny", {"length": 7, "predictions": 8}, "predictions=8 is more than the 7 positions computed"),
        ("gpt2", {"length": 1, "mode": "decode", "n_devices": 2}, "n_devices belongs to mode=train"),
        (
            "gpt2",
            {"length": 1, "mode": "decode", "checkpointing": True},
            "checkpointing belongs to mode=train, not mode=decode",
        ),
    ],
)
def test_work_that_the_model_would_refuse_is_refused(name, settings, remark):
    with pytest.raises((ConfigError, ContextLengthError), match=remark):
        estimate(preset(name), batch=1, **settings)


def test_a_model_without_a_past_has_no_decode_step():
    with pytest.raises(ConfigError, match="causal=False there is no past"):
        estimate(preset("gpt-nano", causal=False), batch=1, length=1, mode="decode")


def test_a_huge_config_is_refused_and_a_very_large_one_is_answered():
    shape = {"vocab_size": 10**6, "context_length": 10**6, "n_heads": 1000}
    with pytest.raises(ConfigError, match="d_ff=4000000000000000000000000000000 is more than 1000000000000000"):
        estimate(GPTConfig(**shape, d_model=10**3, d_ff=4 * 10**30, n_layers=1), batch=1, length=1)
    found = estimate(GPTConfig(**shape, d_model=10**6, n_layers=100), batch=10**6, length=10**6)
    assert found.parameters.total > 10**15
    assert "EiB" in repr(found)


def test_the_preflight_line_says_it_all():
    said = preflight(GPT2, batch=64, length=256, steps=5000, matmul_rate=8e14)
    peak, total = readable_bytes(said.step.memory.peak), readable_flops(said.flops)
    assert said.flops == 5000 * said.step.flops.total
    assert said.line == (
        f"124M parameters · {peak} for a step of 64×256 · {total} in 5,000 steps · "
        f"about {readable_time(said.flops / 2.4e14)} at 30 % of 800 TFLOP/s"
    )


def test_the_preflight_counts_accumulated_batches_and_may_leave_time_out():
    once = preflight(GPT2, batch=4, length=256, steps=10)
    more = preflight(GPT2, batch=4, length=256, steps=10, accumulation=8)
    assert more.flops == 8 * once.flops
    assert "a step of 8×4×256" in more.line
    assert "about" not in once.line
    assert once.seconds is None
    assert "7×16 from 11" in preflight(preset("t5-small"), batch=7, length=16, source_length=11, steps=3).line


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"steps": 10**30},
        {"matmul_rate": 0.0},
        {"matmul_rate": float("inf")},
        {"share": 0.0},
        {"share": 1.1},
    ],
)
def test_a_bad_plan_is_one_clear_line(bad):
    (name,) = bad
    with pytest.raises(ConfigError, match=f"^{name}="):
        preflight(GPT2, **{"batch": 1, "length": 8, "steps": 1, **bad})


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (readable_count(999), "999"),
        (readable_count(10_650_000), "10.7M"),
        (readable_count(8_030_261_248), "8.0B"),
        (readable_count(2 * 10**15), "2,000T"),
        (readable_bytes(1023), "1,023 B"),
        (readable_bytes(1024), "1.0 KiB"),
        (readable_bytes(int(1.3 * 2**30)), "1.3 GiB"),
        (readable_flops(2.1e15), "2.1 PFLOP"),
        (readable_flops(800e12), "800 TFLOP"),
        (readable_time(0.2), "under 1 s"),
        (readable_time(45), "45 s"),
        (readable_time(170), "2.8 min"),
        (readable_time(3600 * 5.2), "5.2 h"),
        (readable_time(86400 * 12), "12 days"),
        (readable_time(31_557_600 * 3000), "3,000 years"),
    ],
)
def test_large_numbers_in_few_characters(shown, expected):
    assert shown == expected


def test_peak_and_bandwidth_go_together():
    with pytest.raises(ConfigError, match=r"peak=1000000000000000.0 and bandwidth=None must be given together"):
        estimate("gpt2", length=8, mode="train").rows(peak=1e15)


def test_masked_words_are_costed_where_they_are_predicted():
    config = preset("bert-tiny", masked_word_head=True, pooler=False)
    all_words, some = (estimate(config, batch=3, length=128, predictions=n, mode="train") for n in (None, 20))
    head = 2 * config.d_model * (config.d_model + config.vocab_size)
    assert all_words.flops.forward - some.flops.forward == 3 * (128 - 20) * head
    logits = 4 * 3 * 128 * config.vocab_size
    assert all_words.memory.activations - some.memory.activations > logits * 4 // 5


def test_costs_answer_without_torch():
    code = "import sys; import qkv;qkv.estimate('gpt2', batch=1, length=8); assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
