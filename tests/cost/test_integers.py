"""Every published integer, in one table; and the mistakes that other calculators make, each by name."""

import pytest

from qkv.config import GPTConfig, preset
from qkv.cost import Workload, cache_bytes, estimate, flops, operations, parameters


def total(name, **changes):
    return lambda: parameters(preset(name, **changes)).total


def cache(name, length):
    return lambda: estimate(name, length=length, mode="decode", dtype="bfloat16").memory.cache


def step(name, length):
    return flops(preset(name), Workload(batch=1, length=length, mode="train", kernel="plain"))


NO_BIAS = {"attention_bias": False, "feed_forward_bias": False, "norm_bias": False}
INTEGERS = {
    "GPT-2": (total("gpt2"), 124_439_808),
    "GPT-2 without biases": (total("gpt2", **NO_BIAS), 124_337_664),
    "GPT-2 XL": (total("gpt2-xl"), 1_557_611_200),
    "BERT-base uncased": (total("bert-base"), 109_482_240),
    "BERT-tiny": (total("bert-tiny"), 4_385_920),
    "BERT-small": (total("bert-small"), 28_763_648),
    "BERT-medium": (total("bert-medium"), 41_373_184),
    "BERT-base cased": (total("bert-base-cased"), 108_310_272),
    "BERT-base zh": (total("bert-base-zh"), 102_267_648),
    "BERT-base multi": (total("bert-base-multi"), 177_853_440),
    "BERT-large": (total("bert-large"), 335_141_888),
    "T5-small": (total("t5-small"), 60_506_624),
    "Llama-2-7B": (total("llama-2-7b"), 6_738_415_616),
    "Llama-3-8B": (total("llama-3-8b"), 8_030_261_248),
    "Attention is all you need, base": (total("transformer-base"), 63_045_632),
    "Attention is all you need, big": (total("transformer-big"), 214_171_648),
    "GPT-3's attention": (
        lambda: parameters(preset("gpt3", attention_bias=False)).of("attention"),
        57_982_058_496,
    ),
    "GPT-2's forward FLOPs at 1024": (lambda: step("gpt2", 1024).forward, 291_648_307_200),
    "GPT-2's training FLOPs at 1024": (lambda: step("gpt2", 1024).total, 874_944_921_600),
    "GPT-2's cache at 1024, 16 bits": (cache("gpt2", 1024), 37_748_736),
    "Llama-2-7B's cache at 4096, 16 bits": (cache("llama-2-7b", 4096), 2 * 2**30),
    "Llama-3-8B's cache at 8192, 16 bits": (cache("llama-3-8b", 8192), 2**30),
    "AdamW's bytes a parameter": (lambda: estimate("gpt2", length=8, mode="train").traffic.update / 124_439_808, 28),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_the_known_integers(name):
    ours, expected = INTEGERS[name]
    assert ours() == expected


def core(name, length, **changes):
    made = operations(preset(name, **changes), Workload(batch=1, length=length, mode="train"))
    return [one for one in made if one.is_attention_core]


def test_fused_attention_is_not_0_flops():
    assert sum(one.flops for one in core("gpt2", 1024)) == 12 * 4 * 1024**2 * 768


def test_a_recurrence_is_not_0_flops():
    config = preset("rnn-nano", cell="lstm", attention="none", vocab_size=5)
    made = operations(config, Workload(batch=2, length=7, source_length=11))
    d = config.d_model
    assert sum(one.flops for one in made if one.part == "decoder.recurrence") == 2 * 7 * 2 * 8 * d * d


def test_fused_attention_never_writes_n_times_n():
    made = core("gpt2", 2048, context_length=2048)
    fused, unfused = (sum(one.moved(fused=way) for one in made) for way in (True, False))
    assert fused == 12 * 4 * 2048 * 768
    # The n×n squares of 12 heads, written and read twice: 33 times as much at n = 2048.
    assert unfused == fused + 12 * 4 * 12 * 2048**2 == 33 * fused


def test_the_output_layer_is_counted_backward_too():
    rows = estimate("gpt2", length=1024, mode="train").rows()
    (head,) = (row for row in rows if row["operation"] == "logits")
    assert head["flops"] == 2 * 1024 * 768 * 50257
    assert head["backward_flops"] == 2 * head["flops"]
    # Forward alone it would be a step 18 % too small.
    assert 0.17 < head["backward_flops"] / step("gpt2", 1024).total < 0.19


def test_d_ff_is_read():
    for d_ff in (1000, 3001):
        found = {one.name: one.flops for one in operations(preset("gpt2", d_ff=d_ff), Workload(batch=1, length=7))}
        assert found["expand"] == found["contract"] == 12 * 2 * 7 * 768 * d_ff


def test_fewer_kv_heads_make_a_smaller_cache_and_smaller_projections():
    eight = preset("llama-3-8b")
    all_heads = preset("llama-3-8b", n_kv_heads=32)
    assert cache_bytes(all_heads, batch=1, length=100) == 4 * cache_bytes(eight, batch=1, length=100)
    found = {one.name: one.flops for one in operations(eight, Workload(batch=1, length=3))}
    assert found["query"] == 4 * found["key"] == 4 * found["value"]
    # Scores are every query head's, however many share a key.
    assert found["scores"] == 32 * 2 * 32 * 128 * 3 * 3


def test_a_head_need_not_be_d_over_h_wide():
    config = GPTConfig(vocab_size=5, context_length=7, d_model=14, n_heads=3, d_head=4, d_value=5, n_layers=1)
    found = {one.name: one.flops for one in operations(config, Workload(batch=1, length=7))}
    assert (found["query"], found["value"]) == (2 * 7 * 14 * 12, 2 * 7 * 14 * 15)
    assert (found["scores"], found["mix"]) == (2 * 3 * 7 * 7 * 4, 2 * 3 * 7 * 7 * 5)
    assert cache_bytes(config, batch=1, length=7) == 4 * 7 * 3 * (4 + 5)


def test_a_flop_is_half_a_multiply_add():
    (head,) = (one for one in operations(preset("gpt2"), Workload(batch=1, length=3)) if one.name == "logits")
    assert head.product is not None
    assert head.flops == 2 * head.product.multiply_adds == 2 * 3 * 768 * 50257
