"""Hypothesis strategies for small configs, weights and inputs of the reference tests."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from qkv.choices import (
    Activation,
    CellKind,
    HeadCombination,
    NormKind,
    NormPosition,
    PoolerActivation,
    PositionKind,
    RNNAttentionScore,
    SinusoidStyle,
)
from qkv.config import BERTConfig, GPTConfig, RNNConfig, RopeScaling, Seq2SeqConfig

CONTEXT_LENGTH = 13


@st.composite
def transformer_settings(draw, positions: PositionKind | None) -> dict[str, Any]:
    """Draw the settings that the three Transformer families share, for any kind of positions or the given one."""
    positions = positions or draw(st.sampled_from(PositionKind))
    chosen = {
        "vocab_size": draw(st.integers(2, 17)),
        "context_length": CONTEXT_LENGTH,
        "positions": positions,
        "sinusoid": draw(st.sampled_from(SinusoidStyle)),
        "position_offset": draw(st.integers(0, 2)) if positions is PositionKind.LEARNED else 0,
        "rope_theta": draw(st.sampled_from([10000.0, 7.0])),
        "rope_scaling": draw(st.none() | _scalings()) if positions is PositionKind.ROTARY else None,
        "relative_buckets": draw(st.sampled_from([4, 8, 12])),
        # A prime, so that no distance is on the edge of a bucket, where rounding would matter.
        "relative_max_distance": draw(st.sampled_from([7, 11, 31])),
        "sliding_window": draw(st.none() | st.integers(1, 5)),
        "d_ff": draw(st.integers(1, 11)),
        "activation": draw(st.sampled_from(Activation)),
        "norm": draw(st.sampled_from(NormKind)),
        "norm_position": draw(st.sampled_from(NormPosition)),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-12, 0.1])),
        "dropout": 0.1,
    }
    switches = (
        "attention_bias scale_scores gated feed_forward_bias norm_bias embedding_norm final_norm "
        "scale_embedding tie_embeddings unembedding_bias scale_logits"
    )
    return chosen | {name: draw(st.booleans()) for name in switches.split()} | draw(_heads(positions))


@st.composite
def _scalings(draw) -> RopeScaling:
    """Draw short original contexts, so that frequencies are below, between and above the two limits."""
    return RopeScaling(
        factor=draw(st.sampled_from([0.5, 3.0])),
        original_context_length=draw(st.none() | st.integers(2, 40)),
        low_freq_factor=draw(st.sampled_from([0.3, 1.0])),
        high_freq_factor=draw(st.sampled_from([1.5, 4.0])),
    )


@st.composite
def _heads(draw, positions: PositionKind) -> dict[str, Any]:
    n_heads = draw(st.integers(1, 6))
    layout = draw(st.sampled_from(HeadCombination))
    chosen = {
        "n_heads": n_heads,
        "head_combination": layout,
        "n_kv_heads": draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0])),
        "output_projection": draw(st.booleans()),
    }
    d_head = 2 * draw(st.integers(1, 3)) if positions is PositionKind.ROTARY else draw(st.integers(1, 5))
    is_usual = draw(st.booleans())
    chosen["d_model"] = draw(st.sampled_from([2, 4])) * n_heads if is_usual else 2 * draw(st.integers(1, 7))
    if not is_usual:
        chosen["d_head"] = d_head
    if layout is HeadCombination.SPLIT and chosen["output_projection"] and draw(st.booleans()):
        chosen["d_value"] = draw(st.integers(1, 7))
    elif layout is HeadCombination.SPLIT and not chosen["output_projection"]:
        chosen |= {"d_model": 2 * n_heads, "d_value": 2}
    return chosen


@st.composite
def gpt_configs(draw, positions: PositionKind | None = None) -> GPTConfig:
    return GPTConfig(
        **draw(transformer_settings(positions)), n_layers=draw(st.integers(1, 3)), causal=draw(st.booleans())
    )


@st.composite
def bert_configs(draw, positions: PositionKind | None = None) -> BERTConfig:
    pooler = draw(st.booleans())
    return BERTConfig(
        **draw(transformer_settings(positions)),
        n_layers=draw(st.integers(1, 3)),
        n_segments=draw(st.integers(0, 3)),
        pooler=pooler,
        pooler_activation=draw(st.sampled_from(PoolerActivation)),
        masked_lm_head=draw(st.booleans()),
        next_sentence_head=pooler and draw(st.booleans()),
        n_classes=draw(st.none() | st.integers(1, 5)) if pooler else None,
    )


@st.composite
def seq2seq_configs(draw, positions: PositionKind | None = None) -> Seq2SeqConfig:
    shared = draw(transformer_settings(positions))
    d_patch = draw(st.none() | st.integers(1, 7))
    share_embeddings = d_patch is None and draw(st.booleans())
    has_one_size = share_embeddings or d_patch is not None
    return Seq2SeqConfig(
        **shared,
        n_encoder_layers=draw(st.integers(1, 2)),
        n_decoder_layers=draw(st.integers(1, 3)),
        share_embeddings=share_embeddings,
        source_vocab_size=shared["vocab_size"] if has_one_size else draw(st.integers(2, 17)),
        d_patch=d_patch,
    )


@st.composite
def rnn_configs(draw) -> RNNConfig:
    return RNNConfig(
        vocab_size=draw(st.integers(2, 17)),
        source_vocab_size=draw(st.integers(2, 17)),
        d_model=2 * draw(st.integers(1, 5)),
        n_encoder_layers=draw(st.integers(1, 3)),
        n_decoder_layers=draw(st.integers(1, 3)),
        cell=draw(st.sampled_from(CellKind)),
        attention=draw(st.sampled_from(RNNAttentionScore)),
        tie_embeddings=draw(st.booleans()),
        context_length=CONTEXT_LENGTH,
        dropout=0.1,
    )


def with_random_weights(model: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Returns the model in float64 with weights far from initialization, such as large scores."""
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = rng.normal(size=parameter.shape) * 0.7
            is_norm = "norm." in name and name.endswith("weight")
            parameter.copy_(torch.from_numpy(drawn + 1.0 if is_norm else drawn))
    return model


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def random_padding(rng: np.random.Generator, shape: tuple[int, int], *, at_least: int) -> np.ndarray:
    """Returns a random attention mask. Each row has its padding on the right, on the left, or anywhere."""
    attention_mask = np.zeros(shape, bool)
    for row in attention_mask:
        n = rng.integers(at_least, shape[1] + 1)
        row[[slice(0, n), slice(shape[1] - n, None), rng.permutation(shape[1])[:n]][rng.integers(3)]] = True
    return attention_mask


def random_documents(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Returns random document numbers, counted from 0 in each row."""
    return (rng.random(shape) < 0.4).cumsum(1)
