"""Peak memory of inference predicted from the config matches the memory that torch allocates."""

import gc

import pytest
import torch

from benchmarks.memory import peak_cpu_bytes
from qkv.choices import NormKind, NormPosition
from qkv.config import GPTConfig, preset
from qkv.cost import Workload
from qkv.cost.estimate import estimate_workload
from qkv.training.benchmark_steps import build_random_model, configure_model_and_build_step

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
    "thin, rotary": {"d_ff": 24, "positions": "rotary"},
    "thin, shared keys": {"d_ff": 24, "n_kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "window": {"sliding_window": 40},
    "window, alibi": {"sliding_window": 40, "positions": "alibi"},
    "pooled": {"head_combination": "pooled", "d_ff": 24},
    "large vocabulary": {"vocab_size": 3001},
    **{
        f"{position} {kind} norm": {"norm_position": position, "norm": kind}
        for position in NormPosition
        for kind in NormKind
    },
}
BERTS = {
    "post": {},
    "pre": {"norm_position": "pre"},
    "gated": {"gated": True},
    "window": {"sliding_window": 40, "positions": "relative"},
    "masked LM head": {"masked_lm_head": True, "vocab_size": 3001},
}
SEQ2SEQS = {
    "post": {},
    "pre": {"norm_position": "pre"},
    "gated": {"gated": True},
    "thin": {"d_ff": 24},
    "relative": {"positions": "relative", "norm": "rms"},
}


def gpt_config(name):
    return GPTConfig(**{**SIZES, "n_layers": 3, **GPTS[name]})


def check_peak(config, rel=0.005, **workload):
    workload = Workload(batch_size=3, device_type="cpu", **workload)

    def build_and_run() -> None:
        configure_model_and_build_step(build_random_model(config, torch.device("cpu"), workload.dtype), workload)()

    gc.collect()
    actual = peak_cpu_bytes(build_and_run)
    assert estimate_workload(config, workload).memory.peak == pytest.approx(actual, rel=rel)


@pytest.mark.parametrize("name", GPTS)
def test_the_predicted_peak_of_a_gpt(name):
    check_peak(gpt_config(name), seq_len=229, mode="prefill")


@pytest.mark.parametrize("name", ["post", "llama", "thin", "thin, rotary", "relative", "pooled"])
def test_the_predicted_peak_of_a_gpt_without_a_cache(name):
    check_peak(gpt_config(name), seq_len=229, mode="forward")


@pytest.mark.parametrize("name", ["pre", "llama", "alibi", "window", "pooled"])
def test_the_predicted_peak_of_eager_attention(name):
    check_peak(gpt_config(name), seq_len=229, mode="forward", kernel="eager")


@pytest.mark.parametrize("kernel", ["fused", "eager"])
@pytest.mark.parametrize("name", ["pre", "llama", "pooled"])
def test_the_predicted_peak_of_a_decode_step(name, kernel):
    # The activations of one token are small compared with the other tensors of a call.
    check_peak(gpt_config(name), rel=0.02, seq_len=229, mode="decode", kernel=kernel)


@pytest.mark.parametrize("name", BERTS)
def test_the_predicted_peak_of_a_bert(name):
    check_peak(preset("bert-nano", **{**SIZES, **BERTS[name]}), seq_len=229, mode="forward")


@pytest.mark.parametrize("n_source", [61, 251])
@pytest.mark.parametrize("mode", ["forward", "prefill"])
@pytest.mark.parametrize("name", SEQ2SEQS)
def test_the_predicted_peak_of_an_encoder_decoder(name, mode, n_source):
    config = preset("transformer-nano", **{**SIZES, **SEQ2SEQS[name]})
    check_peak(config, seq_len=149, source_len=n_source, mode=mode)


@pytest.mark.parametrize("attention", ["dot", "general", "additive"])
def test_the_predicted_peak_of_an_rnn_with_attention(attention):
    config = preset("rnn-nano", vocab_size=131, context_length=256, attention=attention)
    check_peak(config, rel=0.01, seq_len=229, source_len=199, mode="forward")


@pytest.mark.parametrize("logits_to_keep", [1, 101])
def test_the_predicted_peak_with_a_limited_number_of_logits(logits_to_keep):
    check_peak(gpt_config("large vocabulary"), seq_len=229, mode="prefill", logits_to_keep=logits_to_keep)


def test_the_predicted_peak_in_16_bits():
    check_peak(gpt_config("pre"), seq_len=229, mode="prefill", dtype="bfloat16")


def test_a_block_frees_the_attention_output_before_the_feed_forward():
    """Live: inputs of stack and block, residual stream, its normalized copy, input and output of the activation."""
    config, n = gpt_config("pre"), 3 * 229
    workload = Workload(batch_size=3, seq_len=229, mode="forward", device_type="cpu")
    model = build_random_model(config, torch.device("cpu"), workload.dtype)
    step = configure_model_and_build_step(model, workload)
    positions = 8 * 229
    assert peak_cpu_bytes(step) == 4 * n * (4 * config.d_model + 2 * config.d_ff) + positions


def test_the_peak_of_a_generation_is_the_larger_of_prefill_and_last_step():
    config = gpt_config("pre")
    prefill, generation = (
        estimate_workload(config, Workload(batch_size=3, seq_len=201, device_type="cpu", **workload)).memory
        for workload in ({"mode": "prefill", "logits_to_keep": 1}, {"mode": "generate", "n_new_tokens": 29})
    )
    assert generation.activations == prefill.activations
    assert generation.cache > prefill.cache
