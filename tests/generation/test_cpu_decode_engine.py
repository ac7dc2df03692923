"""The lean step of an encoder–decoder gives what the model's own road gives, and stands back where it cannot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import AttentionKernel
from qkv.config import BeamConfig, Seq2SeqConfig
from qkv.errors import InputError
from qkv.generation import translate
from qkv.generation.cpu_decode_engine import CPUDecodeEngine, supports_cpu_decode_engine
from qkv.generation.decoder import Seq2SeqDecoder, encode_sources
from qkv.generation.prepacked_weights import prepack_weights
from qkv.inspection import record
from qkv.nn import use_attention_kernel
from tests.agreement.families import shaken

SIZES = {
    "vocab_size": 31, "source_vocab_size": 37, "share_embeddings": False, "context_length": 23,
    "d_model": 12, "n_heads": 6, "d_ff": 17, "n_encoder_layers": 1, "n_decoder_layers": 2,
}  # fmt: skip
SHAPES = {
    "the paper's": {},
    "the shipped one": {
        "norm": "rms", "norm_position": "pre", "final_norm": True, "gated": True, "activation": "silu",
        "attention_bias": False, "feed_forward_bias": False,
    },
    "BART's": {
        "positions": "learned", "position_offset": 2, "embedding_norm": True, "activation": "gelu",
        "unembedding_bias": True, "scale_embedding": False,
    },
    "grouped and uneven heads": {"n_kv_heads": 2, "d_head": 5, "d_value": 3, "tie_embeddings": False},
    "unscaled scores, scaled logits": {"scale_scores": False, "scale_logits": True, "norm_position": "pre"},
    "T5's": {"positions": "relative", "norm": "rms", "norm_position": "pre", "n_kv_heads": 2},
    "rotary": {"positions": "rotary", "norm": "rms"},
    "windowed": {"sliding_window": 3, "positions": "alibi"},
}  # fmt: skip
UNUSUAL = {
    "concatenated": {"positions": "concatenated"},
    "pooled": {"head_layout": "pooled"},
    "without output projection": {"output_projection": False},
}
SOURCES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]


def small(seed=0, **shape):
    return shaken(Seq2SeqConfig(**{**SIZES, **shape}), seed).float().eval()


@settings(max_examples=20)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 99))
@torch.inference_mode()
def test_each_step_agrees_with_the_models_own_road_through_padding_and_selection(name, seed):
    model = small(seed, **SHAPES[name])
    packing = prepack_weights(model)
    assert supports_cpu_decode_engine(model, packing)
    lean = CPUDecodeEngine(model, packing, capacity=7)
    roads = [encode_sources(model, SOURCES, capacity=7, cpu_engine=road) for road in (lean, None)]
    chance = torch.Generator().manual_seed(seed)
    n_rows, texts = 3, 3
    for step in range(7):
        ids = torch.randint(0, SIZES["vocab_size"], (n_rows,), generator=chance)
        one, other = (road.step(ids) for road in roads)
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 2e-5 * max(1.0, float(other.abs().max()))
        left = torch.tensor([0, 2]) if step == 3 else None
        places = range(texts) if left is None else left.tolist()
        n_each, width = n_rows // texts, 4
        rows = [place * n_each + int(torch.randint(0, n_each, (1,), generator=chance))
                for place in places for _ in range(width)]  # fmt: skip
        for road in roads:
            road.reorder(torch.tensor(rows), sequences=left)
        texts = len(places)
        n_rows = texts * width


@pytest.mark.parametrize("name", UNUSUAL)
def test_other_shapes_take_the_models_own_road(name):
    model = small(**UNUSUAL[name])
    assert not supports_cpu_decode_engine(model, prepack_weights(model))


def test_other_numbers_other_kernels_and_training_take_the_models_own_road():
    model = small()
    packing = prepack_weights(model)
    assert supports_cpu_decode_engine(model, packing)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        assert not supports_cpu_decode_engine(model, packing)
    model.train()
    assert not supports_cpu_decode_engine(model, packing)
    model.eval().double()
    assert not supports_cpu_decode_engine(model, packing)


def test_who_looks_inside_a_search_sees_it_and_who_changes_it_is_heard():
    model = small()
    asked = {"first": 1, "max_new": [5], "stop_ids": frozenset(), "beam": BeamConfig(n_beams=2)}
    packing = prepack_weights(model)
    with record(model, "decoder.blocks.1.resid_mid") as trace:
        ((seen, *_),) = translate(model, [SOURCES[0]], **asked, prepacked=packing)
    assert len(trace.names) == 1
    ((unseen, *_),) = translate(model, [SOURCES[0]], **asked, prepacked=packing)
    assert seen.ids == unseen.ids
    stop = model.unembedding.logits.intervene(lambda logits: -logits)
    ((turned, *_),) = translate(model, [SOURCES[0]], **asked, prepacked=packing)
    stop()
    assert turned.ids != unseen.ids
    model.decoder.blocks[0].feed_forward.down_proj.register_forward_hook(lambda *_: None)
    assert not supports_cpu_decode_engine(model, packing)


class AllEqual(Seq2SeqDecoder):
    """The bug: one token too many is held to be the same in all beams, and is not moved with them."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        super().reorder(rows, sequences=sequences, common_prefix=common_prefix + 1)


@pytest.mark.parametrize(("kind", "is_right"), [(Seq2SeqDecoder, True), (AllEqual, False)])
def test_what_beams_have_in_common_stays_and_the_rest_moves(monkeypatch, kind, is_right):
    """Scores are those of a full pass, which they are not where too little is moved."""
    monkeypatch.setattr("qkv.generation.decoder.Seq2SeqDecoder", kind)
    errors = []
    for seed in range(8):
        model = small(seed)
        asked = {"first": 1, "max_new": [9], "stop_ids": frozenset({2}), "beam": BeamConfig(n_beams=4, n_best=4)}
        (found,) = translate(model, [SOURCES[0]], **asked)
        for one in found:
            ids = torch.tensor([[1, *one.ids[:-1]]])
            with torch.no_grad():
                log_p = model(torch.tensor([SOURCES[0]]), ids)[0].log_softmax(-1)
            own = [float(log_p[i, number]) for i, number in enumerate(one.ids)]
            errors.append(abs(sum(own) / len(own) - one.score))
    assert (max(errors) < 1e-4) is is_right


def test_a_beginning_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="start_id=31 is outside the vocabulary of 31"):
        translate(small(), [[3]], start_id=31, max_new=[5], stop_ids=frozenset())
