"""The CPU decode engine equals the eager encoder–decoder, and rejects models that it does not support."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.accel.cpu.decode_engine import CPUDecodeEngine, supports_cpu_decode_engine
from qkv.accel.cpu.prepacked_weights import prepack_weights
from qkv.choices import AttentionKernel
from qkv.config import BeamConfig, Seq2SeqConfig
from qkv.errors import InputError
from qkv.generation import translate
from qkv.generation.decoder import Seq2SeqDecoder, encode_sources
from qkv.inspection import record
from qkv.nn import use_attention_kernel
from tests.agreement.model_strategies import build_random_model

SIZES = {
    "vocab_size": 31, "source_vocab_size": 37, "share_embeddings": False, "context_length": 23,
    "d_model": 12, "n_heads": 6, "d_ff": 17, "n_encoder_layers": 1, "n_decoder_layers": 2,
}  # fmt: skip
SHAPES = {
    "original Transformer": {},
    "shipped model": {
        "norm": "rms", "norm_position": "pre", "final_norm": True, "gated": True, "activation": "silu",
        "attention_bias": False, "feed_forward_bias": False,
    },
    "BART": {
        "positions": "learned", "position_offset": 2, "embedding_norm": True, "activation": "gelu",
        "unembedding_bias": True, "scale_embedding": False,
    },
    "grouped and uneven heads": {"n_kv_heads": 2, "d_head": 5, "d_value": 3, "tie_embeddings": False},
    "unscaled scores, scaled logits": {"scale_scores": False, "scale_logits": True, "norm_position": "pre"},
    "T5": {"positions": "relative", "norm": "rms", "norm_position": "pre", "n_kv_heads": 2},
    "rotary": {"positions": "rotary", "norm": "rms"},
    "windowed": {"sliding_window": 3, "positions": "alibi"},
}  # fmt: skip
UNSUPPORTED = {
    "concatenated": {"positions": "concatenated"},
    "pooled": {"head_combination": "pooled"},
    "without output projection": {"output_projection": False},
}
SOURCES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]


def small_seq2seq(seed=0, **shape):
    return build_random_model(Seq2SeqConfig(**{**SIZES, **shape}), seed).float().eval()


@settings(max_examples=20)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 99))
@torch.inference_mode()
def test_each_step_agrees_with_the_eager_model_with_padding_and_reordering(name, seed):
    model = small_seq2seq(seed, **SHAPES[name])
    prepacked = prepack_weights(model)
    assert supports_cpu_decode_engine(model, prepacked)
    engine = CPUDecodeEngine(model, prepacked, capacity=7)
    decoders = [encode_sources(model, SOURCES, capacity=7, cpu_engine=option) for option in (engine, None)]
    generator = torch.Generator().manual_seed(seed)
    n_rows, n_sequences = 3, 3
    for step in range(7):
        ids = torch.randint(0, SIZES["vocab_size"], (n_rows,), generator=generator)
        actual, expected = (decoder.step(ids) for decoder in decoders)
        assert actual.shape == expected.shape
        assert (actual - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))
        remaining = torch.tensor([0, 2]) if step == 3 else None
        indices = range(n_sequences) if remaining is None else remaining.tolist()
        n_each, width = n_rows // n_sequences, 4
        rows = [index * n_each + int(torch.randint(0, n_each, (1,), generator=generator))
                for index in indices for _ in range(width)]  # fmt: skip
        for decoder in decoders:
            decoder.reorder(torch.tensor(rows), sequences=remaining)
        n_sequences = len(indices)
        n_rows = n_sequences * width


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_shapes_use_the_eager_model(name):
    model = small_seq2seq(**UNSUPPORTED[name])
    assert not supports_cpu_decode_engine(model, prepack_weights(model))


def test_other_dtypes_other_kernels_and_training_use_the_eager_model():
    model = small_seq2seq()
    prepacked = prepack_weights(model)
    assert supports_cpu_decode_engine(model, prepacked)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        assert not supports_cpu_decode_engine(model, prepacked)
    model.train()
    assert not supports_cpu_decode_engine(model, prepacked)
    model.eval().double()
    assert not supports_cpu_decode_engine(model, prepacked)


def test_hooks_and_interventions_take_effect_during_beam_search():
    model = small_seq2seq()
    options = {"start_id": 1, "max_new": [5], "stop_ids": frozenset(), "beam": BeamConfig(n_beams=2)}
    prepacked = prepack_weights(model)
    with record(model, "decoder.blocks.1.resid_mid") as trace:
        ((recorded, *_),) = translate(model, [SOURCES[0]], **options, prepacked=prepacked)
    assert len(trace.names) == 1
    ((plain, *_),) = translate(model, [SOURCES[0]], **options, prepacked=prepacked)
    assert recorded.ids == plain.ids
    stop = model.unembedding.logits.intervene(lambda logits: -logits)
    ((changed, *_),) = translate(model, [SOURCES[0]], **options, prepacked=prepacked)
    stop()
    assert changed.ids != plain.ids
    model.decoder.blocks[0].feed_forward.down_proj.register_forward_hook(lambda *_: None)
    assert not supports_cpu_decode_engine(model, prepacked)


class WrongCommonPrefix(Seq2SeqDecoder):
    """Planted bug: the common prefix is one token too long, so this token is not reordered."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        super().reorder(rows, sequences=sequences, common_prefix=common_prefix + 1)


@pytest.mark.parametrize(("decoder_class", "is_correct"), [(Seq2SeqDecoder, True), (WrongCommonPrefix, False)])
def test_reordering_moves_all_but_the_common_prefix(monkeypatch, decoder_class, is_correct):
    """Scores equal those of a full pass only if enough of the cache is reordered."""
    monkeypatch.setattr("qkv.generation.decoder.Seq2SeqDecoder", decoder_class)
    errors = []
    for seed in range(8):
        model = small_seq2seq(seed)
        options = {"start_id": 1, "max_new": [9], "stop_ids": frozenset({2}), "beam": BeamConfig(n_beams=4, n_best=4)}
        (hypotheses,) = translate(model, [SOURCES[0]], **options)
        for hypothesis in hypotheses:
            ids = torch.tensor([[1, *hypothesis.ids[:-1]]])
            with torch.no_grad():
                log_p = model(torch.tensor([SOURCES[0]]), ids)[0].log_softmax(-1)
            log_ps = [float(log_p[i, token_id]) for i, token_id in enumerate(hypothesis.ids)]
            errors.append(abs(sum(log_ps) / len(log_ps) - hypothesis.score))
    assert (max(errors) < 1e-4) is is_correct


def test_a_start_id_outside_the_vocabulary_is_rejected():
    with pytest.raises(InputError, match=r"start_id .*\b31\b.*, got 31$"):
        translate(small_seq2seq(), [[3]], start_id=31, max_new=[5], stop_ids=frozenset())
