"""The most memory that a pass without gradients holds, predicted from the config, is what torch holds."""

import gc

import pytest
import torch

from benchmarks.memory import most_on_cpu
from qkv.config import GPTConfig, preset
from qkv.cost import Workload
from qkv.cost.estimate import estimate_of
from qkv.training.measuring import random_model, step_of

SIZES = {"vocab_size": 131, "context_length": 256, "d_model": 48, "n_heads": 4}
LLAMA = {"gated": True, "activation": "silu", "norm": "rms", "positions": "rotary", "n_kv_heads": 2}
GPTS = {
    "pre": {},
    "post": {"norm_position": "post"},
    "gated": {"gated": True},
    "post, gated, rms": {"norm_position": "post", "gated": True, "norm": "rms"},
    "llama": LLAMA,
    "one layer": {"n_layers": 1},
    "thin": {"d_ff": 24},
    "thin, post, rms": {"d_ff": 8, "norm_position": "post", "norm": "rms"},
    "thin, turned": {"d_ff": 24, "positions": "rotary"},
    "thin, shared keys": {"d_ff": 24, "n_kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "window": {"sliding_window": 40},
    "window, alibi": {"sliding_window": 40, "positions": "alibi"},
    "pooled": {"head_layout": "pooled", "d_ff": 24},
    "many words": {"vocab_size": 3001},
}
BERTS = {
    "post": {},
    "pre": {"norm_position": "pre"},
    "gated": {"gated": True},
    "window": {"sliding_window": 40, "positions": "relative"},
    "words": {"masked_word_head": True, "vocab_size": 3001},
}
SEQ2SEQS = {
    "post": {},
    "pre": {"norm_position": "pre"},
    "gated": {"gated": True},
    "thin": {"d_ff": 24},
    "relative": {"positions": "relative", "norm": "rms"},
}


def gpt(name):
    return GPTConfig(**{**SIZES, "n_layers": 3, **GPTS[name]})


def check(config, rel=0.005, **work):
    work = Workload(batch=3, backend="cpu", **work)

    def whole() -> None:
        step_of(random_model(config, torch.device("cpu"), work.dtype), work)()

    gc.collect()
    real = most_on_cpu(whole)
    assert estimate_of(config, work).memory.peak == pytest.approx(real, rel=rel)


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_holds_what_is_predicted(name):
    check(gpt(name), length=229, mode="prefill")


@pytest.mark.parametrize("name", ["post", "llama", "thin", "thin, turned", "relative", "pooled"])
def test_without_a_cache_a_gpt_holds_its_keys_and_values_while_it_looks(name):
    check(gpt(name), length=229, mode="forward")


@pytest.mark.parametrize("name", ["pre", "llama", "alibi", "window", "pooled"])
def test_plain_attention_holds_what_is_predicted(name):
    check(gpt(name), length=229, mode="forward", kernel="plain")


@pytest.mark.parametrize("kernel", ["fused", "plain"])
@pytest.mark.parametrize("name", ["pre", "llama", "pooled"])
def test_a_decoding_step_holds_what_is_predicted(name, kernel):
    # One token is little beside the small tensors of its call.
    check(gpt(name), rel=0.02, length=229, mode="decode", kernel=kernel)


@pytest.mark.parametrize("name", BERTS)
def test_a_bert_holds_what_is_predicted(name):
    check(preset("bert-nano", **{**SIZES, **BERTS[name]}), length=229, mode="forward")


@pytest.mark.parametrize("n_source", [61, 251])
@pytest.mark.parametrize("mode", ["forward", "prefill"])
@pytest.mark.parametrize("name", SEQ2SEQS)
def test_an_encoder_and_a_decoder_hold_what_is_predicted(name, mode, n_source):
    config = preset("transformer-nano", **{**SIZES, **SEQ2SEQS[name]})
    check(config, length=149, source_length=n_source, mode=mode)


@pytest.mark.parametrize("attention", ["dot", "general", "additive"])
def test_an_rnn_s_attention_holds_what_is_predicted(attention):
    config = preset("rnn-nano", vocab_size=131, context_length=256, attention=attention)
    check(config, rel=0.01, length=229, source_length=199, mode="forward")


@pytest.mark.parametrize("predictions", [1, 101])
def test_a_prompt_whose_last_logits_alone_are_wanted(predictions):
    check(gpt("many words"), length=229, mode="prefill", predictions=predictions)


def test_at_16_bits_a_pass_holds_half():
    check(gpt("pre"), length=229, mode="prefill", dtype="bfloat16")


def test_a_block_lets_go_of_what_attention_wrote():
    """Pre-norm: the stack's input, the block's, the stream between, its normed copy, and the activation's two."""
    config, n = gpt("pre"), 3 * 229
    work = Workload(batch=3, length=229, mode="forward", backend="cpu")
    model = random_model(config, torch.device("cpu"), work.dtype)
    step = step_of(model, work)
    positions = 8 * 229
    assert most_on_cpu(step) == 4 * n * (4 * config.d_model + 2 * config.d_ff) + positions


def test_a_generation_holds_the_larger_of_its_prompt_and_its_last_step():
    config = gpt("pre")
    prompt, whole = (
        estimate_of(config, Workload(batch=3, length=201, backend="cpu", **work)).memory
        for work in ({"mode": "prefill", "predictions": 1}, {"mode": "generate", "new": 29})
    )
    assert whole.activations == prompt.activations
    assert whole.cache > prompt.cache
