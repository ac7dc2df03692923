"""Norms of the residual stream and of the output of each sublayer and head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import Stack
from qkv.inspection.activation_cache import ActivationCache, get_attention, get_blocks
from qkv.inspection.attention_map import project_head_results
from qkv.inspection.logit_lens import depth_names, residual_tap_names
from qkv.inspection.short_repr import ShortRepr


@dataclass(frozen=True, kw_only=True, repr=False)
class ResidualStreamView(ShortRepr):
    """Euclidean norms of the residual stream and of what each sublayer adds, by layer and token."""

    stack: Stack
    positions: list[str]
    depths: list[str]
    residual_norms: Float[Tensor, "depth position"]
    sublayers: list[str]
    """`attention`, `cross_attention` (decoders only) and `feed_forward`."""
    sublayer_norms: Float[Tensor, "part layer position"]
    head_norms: Float[Tensor, "layer head position"]
    """Norms of each self-attention head's output, without the projection's bias."""


def residual_stream_norms(seen: ActivationCache, stack: Stack | None = None) -> ResidualStreamView:
    """Compute norms of the residual stream. For an encoder–decoder, `stack` selects the encoder or the decoder."""
    stack = stack or seen.stacks[0]
    stack = Stack.DECODER if stack is Stack.CROSS else stack
    names = residual_tap_names(seen.model, stack)
    before = names[0].removesuffix("blocks.0.resid_pre")
    parts = (
        ["attention", "cross_attention", "feed_forward"] if stack is Stack.DECODER else ["attention", "feed_forward"]
    )
    layers = range(len(get_blocks(seen.model, stack)))
    writes = [
        [seen.get_activation(f"{before}blocks.{layer}.{part}_out").norm(dim=-1) for layer in layers] for part in parts
    ]
    return ResidualStreamView(
        stack=stack,
        positions=seen.query_labels(stack),
        depths=depth_names(len(names)),
        residual_norms=torch.stack([seen.get_activation(name).norm(dim=-1) for name in names]),
        sublayers=parts,
        sublayer_norms=torch.stack([torch.stack(rows) for rows in writes]),
        head_norms=torch.stack([head_outputs(seen, stack, layer).norm(dim=-1) for layer in layers]),
    )


@torch.no_grad()
def head_outputs(seen: ActivationCache, stack: Stack, layer: int) -> Float[Tensor, "head position d_model"]:
    """Returns the vector that each head adds to the residual stream.

    Together with the bias of the output projection, they sum to the attention output.
    """
    results = torch.cat([one.heads[0] for one in seen.attention_records(stack, layer)], dim=1)
    return project_head_results(get_attention(seen.model, stack, layer), results)
