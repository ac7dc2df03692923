"""Hypothesis strategies for small random configs of the four model families."""

import torch
from hypothesis import strategies as st

from qkv.choices import (
    Activation,
    CellKind,
    HeadCombination,
    NormKind,
    NormPosition,
    PoolerActivation,
    PositionKind,
    RNNAttentionScore,
)
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig


@st.composite
def transformer_settings(draw):
    """Settings shared by all Transformers, with widths that do not divide each other."""
    n_kv_heads = draw(st.integers(1, 3))
    n_heads = n_kv_heads * draw(st.integers(1, 3))
    d_model = 2 * draw(st.integers(2, 9))
    layout = draw(st.sampled_from(HeadCombination))
    d_value = draw(st.integers(1, 7)) if layout is HeadCombination.SPLIT else d_model
    joined = n_heads * d_value if layout is HeadCombination.SPLIT else d_value
    return {
        "vocab_size": draw(st.integers(5, 23)),
        "context_length": draw(st.integers(13, 19)),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "d_head": 2 * draw(st.integers(1, 4)),
        "d_value": d_value,
        "head_combination": layout,
        "output_projection": joined != d_model or draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "scale_scores": draw(st.booleans()),
        "sliding_window": draw(st.none() | st.integers(1, 17)),
        "d_ff": draw(st.integers(1, 29)),
        "activation": draw(st.sampled_from(Activation)),
        "gated": draw(st.booleans()),
        "feed_forward_bias": draw(st.booleans()),
        "norm": draw(st.sampled_from(NormKind)),
        "norm_position": draw(st.sampled_from(NormPosition)),
        "norm_bias": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "final_norm": draw(st.booleans()),
        "positions": draw(st.sampled_from(PositionKind)),
        "position_offset": draw(st.integers(0, 2)),
        "relative_buckets": draw(st.sampled_from([4, 8])),
        "scale_embedding": draw(st.booleans()),
        "scale_logits": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "unembedding_bias": draw(st.booleans()),
    }


layers = st.integers(1, 3)

gpt = st.builds(
    lambda shared, n, causal: GPTConfig(**shared, n_layers=n, causal=causal),
    transformer_settings(),
    layers,
    st.booleans(),
)


@st.composite
def bert(draw):
    has_pooler = draw(st.booleans())
    return BERTConfig(
        **draw(transformer_settings()),
        n_layers=draw(layers),
        n_segments=draw(st.integers(0, 3)),
        pooler=has_pooler,
        pooler_activation=draw(st.sampled_from(PoolerActivation)),
        masked_lm_head=draw(st.booleans()),
        next_sentence_head=has_pooler and draw(st.booleans()),
        n_classes=draw(st.none() | st.integers(1, 5)) if has_pooler else None,
    )


@st.composite
def seq2seq(draw):
    shared = draw(transformer_settings())
    d_patch = draw(st.none() | st.integers(1, 13))
    share_embeddings = d_patch is None and draw(st.booleans())
    return Seq2SeqConfig(
        **shared,
        n_encoder_layers=draw(layers),
        n_decoder_layers=draw(layers),
        share_embeddings=share_embeddings,
        source_vocab_size=shared["vocab_size"] if share_embeddings or d_patch else draw(st.integers(5, 23)),
        d_patch=d_patch,
    )


rnn = st.builds(
    RNNConfig,
    vocab_size=st.integers(5, 23),
    source_vocab_size=st.integers(5, 23),
    d_model=st.integers(1, 9).map(lambda half: 2 * half),
    n_encoder_layers=layers,
    n_decoder_layers=layers,
    cell=st.sampled_from(CellKind),
    attention=st.sampled_from(RNNAttentionScore),
    tie_embeddings=st.booleans(),
)

FAMILIES = {"gpt": gpt, "bert": bert(), "seq2seq": seq2seq(), "rnn": rnn}


def make_source(config, batch, m):
    """Token ids, or image patches if the model embeds patches."""
    if isinstance(config, Seq2SeqConfig) and config.d_patch is not None:
        return torch.zeros(batch, m, config.d_patch, device="meta")
    return torch.zeros(batch, m, dtype=torch.long, device="meta")
