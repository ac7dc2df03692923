"""Compute the norms of the residual stream and of the outputs of each sublayer and head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionStack
from qkv.inspection.activation_cache import ActivationCache, get_attention, get_blocks
from qkv.inspection.attention_map import project_head_results
from qkv.inspection.logit_lens import depth_names, residual_tap_names
from qkv.inspection.short_repr import ShortRepr


@dataclass(frozen=True, kw_only=True, repr=False)
class ResidualStreamView(ShortRepr):
    """The Euclidean norms of the residual stream and of each sublayer's output, for each layer and token."""

    stack: AttentionStack
    positions: list[str]
    depths: list[str]
    residual_norms: Float[Tensor, "depth position"]
    sublayers: list[str]
    """The names of the sublayers: `attention`, `cross_attention` (decoders only) and `feed_forward`."""
    sublayer_norms: Float[Tensor, "part layer position"]
    head_norms: Float[Tensor, "layer head position"]
    """The norms of each self-attention head's output, without the bias of the output projection."""


def residual_stream_norms(cache: ActivationCache, stack: AttentionStack | None = None) -> ResidualStreamView:
    """Compute the norms of the residual stream. For an encoder–decoder, `stack` selects the encoder or the decoder."""
    stack = stack or cache.stacks[0]
    stack = AttentionStack.DECODER if stack is AttentionStack.CROSS else stack
    names = residual_tap_names(cache.model, stack)
    prefix = names[0].removesuffix("blocks.0.resid_pre")
    sublayers = (
        ["attention", "cross_attention", "feed_forward"]
        if stack is AttentionStack.DECODER
        else ["attention", "feed_forward"]
    )
    layers = range(len(get_blocks(cache.model, stack)))
    sublayer_norms = [
        [cache.get_activation(f"{prefix}blocks.{layer}.{sublayer}_out").norm(dim=-1) for layer in layers]
        for sublayer in sublayers
    ]
    return ResidualStreamView(
        stack=stack,
        positions=cache.query_labels(stack),
        depths=depth_names(len(names)),
        residual_norms=torch.stack([cache.get_activation(name).norm(dim=-1) for name in names]),
        sublayers=sublayers,
        sublayer_norms=torch.stack([torch.stack(rows) for rows in sublayer_norms]),
        head_norms=torch.stack([head_outputs(cache, stack, layer).norm(dim=-1) for layer in layers]),
    )


@torch.no_grad()
def head_outputs(cache: ActivationCache, stack: AttentionStack, layer: int) -> Float[Tensor, "head position d_model"]:
    """Return the vector that each head adds to the residual stream.

    The vectors of all heads and the bias of the output projection sum to the attention output.
    """
    results = torch.cat([record.head_outputs[0] for record in cache.attention_records(stack, layer)], dim=1)
    return project_head_results(get_attention(cache.model, stack, layer), results)
