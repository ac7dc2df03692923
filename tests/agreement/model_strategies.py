"""Hypothesis strategies for small models of every family."""

import torch
from hypothesis import strategies as st
from torch import nn

from qkv.choices import (
    Activation,
    CellKind,
    HeadCombination,
    NormKind,
    NormPosition,
    PositionKind,
    RNNAttentionScore,
)
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.models import build

VOCABULARY, SOURCE_VOCABULARY = 23, 19
CONTEXT = 29
D_MODEL, N_HEADS, D_HEAD = 10, 6, 4
VALUE_WIDTHS = {
    HeadCombination.SPLIT: (D_HEAD, 7),
    HeadCombination.POOLED: (D_MODEL,),
    HeadCombination.POOLED_MEAN: (D_MODEL,),
}

seeds = st.integers(min_value=0, max_value=999)


@st.composite
def settings(draw, *, fusable=False):
    """Settings shared by all Transformers. With `fusable`, only those with a fused CPU kernel (d_value = d_head)."""
    layout = HeadCombination.SPLIT if fusable else draw(st.sampled_from(HeadCombination))
    return {
        "context_length": CONTEXT,
        "d_model": D_MODEL,
        "n_heads": N_HEADS,
        "d_head": D_HEAD,
        "head_combination": layout,
        "d_value": D_HEAD if fusable else draw(st.sampled_from(VALUE_WIDTHS[layout])),
        "n_kv_heads": draw(st.sampled_from((6, 3, 2, 1))),
        "positions": draw(st.sampled_from(PositionKind)),
        "relative_buckets": 8,
        "relative_max_distance": 13,
        "norm": draw(st.sampled_from(NormKind)),
        "norm_position": draw(st.sampled_from(NormPosition)),
        "activation": draw(st.sampled_from(Activation)),
        "gated": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from((None, None, 3))),
        "d_ff": 17,
    }


@st.composite
def gpts(draw, **chosen):
    shared = draw(settings(fusable=chosen.pop("fusable", False)))
    return GPTConfig(**{**shared, "vocab_size": VOCABULARY, "n_layers": 2, **chosen})


@st.composite
def berts(draw, **chosen):
    shared = draw(settings(fusable=chosen.pop("fusable", False)))
    heads = {"masked_lm_head": True, "next_sentence_head": True, "n_classes": 5}
    return BERTConfig(**{**shared, "vocab_size": VOCABULARY, "n_layers": 2, **heads, **chosen})


@st.composite
def seq2seqs(draw, **chosen):
    shared = draw(settings(fusable=chosen.pop("fusable", False)))
    vocabularies = {
        "vocab_size": VOCABULARY, "source_vocab_size": SOURCE_VOCABULARY, "share_embeddings": False,
    }  # fmt: skip
    layers = {"n_encoder_layers": 2, "n_decoder_layers": 3}
    return Seq2SeqConfig(**{**shared, **vocabularies, **layers, **chosen})


@st.composite
def rnns(draw, **chosen):
    config = {
        "vocab_size": VOCABULARY,
        "source_vocab_size": SOURCE_VOCABULARY,
        "d_model": D_MODEL,
        "n_encoder_layers": draw(st.sampled_from((1, 2))),
        "n_decoder_layers": draw(st.sampled_from((1, 2))),
        "cell": draw(st.sampled_from(CellKind)),
        "attention": draw(st.sampled_from(RNNAttentionScore)),
    }
    return RNNConfig(**{**config, **chosen})


def build_random_model(config, seed=0):
    """Returns a float64 model with random parameters, because initial biases are 0 and attention is uniform."""
    model = build(config, seed=seed).double().eval()
    randomize_parameters(model, seed)
    return model


def randomize_parameters(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.4)


def random_ids(seed, batch, n, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, (batch, n), generator=torch.Generator().manual_seed(seed))


def random_source_ids(seed, batch, n):
    return random_ids(seed + 1, batch, n, SOURCE_VOCABULARY)


def assert_close(actual, expected):
    """Assert equality up to the summation order in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
