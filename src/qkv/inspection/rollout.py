"""Attention rollout: attention weights multiplied across layers."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionKind
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache
from qkv.inspection.short_repr import ShortRepr
from qkv.models import RNNSeq2Seq


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionRollout(ShortRepr):
    """The share of every input token in every token after each layer. `sequence` and `source` of a row sum to 1."""

    sequence: Float[Tensor, "layer query key"]
    source: Float[Tensor, "layer query source"] | None
    """The share of each source token, for a decoder."""


def rollout_from_means(means: Float[Tensor, "layer query key"]) -> Float[Tensor, "layer query key"]:
    """Multiply Â = ½ head mean + ½ identity (the residual connection) across layers (arXiv:2005.00928)."""
    share = torch.eye(means.shape[-1], dtype=means.dtype, device=means.device)
    found = []
    for layer in means:
        share = (layer @ share + share) / 2
        found.append(share)
    return torch.stack(found)


def attention_rollout(seen: ActivationCache, stack: AttentionKind | None = None) -> AttentionRollout:
    """Compute attention rollout through a GPT, BERT, encoder or decoder.

    In a decoder, cross-attention contributes the shares of the source in the same way: half from the residual connection
    and half from the attended source states.
    """
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("attention rollout requires the layers of a Transformer, but this model is an RNN")
    stack = stack or seen.stacks[0]
    if stack in (AttentionKind.SELF, AttentionKind.ENCODER):
        return AttentionRollout(sequence=rollout_from_means(seen.mean_weights(stack)), source=None)
    of_encoder = rollout_from_means(seen.mean_weights(AttentionKind.ENCODER))[-1]
    own_looks, cross_looks = seen.mean_weights(AttentionKind.DECODER), seen.mean_weights(AttentionKind.CROSS)
    n = own_looks.shape[-1]
    own = torch.eye(n, dtype=own_looks.dtype, device=own_looks.device)
    source = own_looks.new_zeros(n, of_encoder.shape[-1])
    owns, sources = [], []
    for look, cross in zip(own_looks, cross_looks, strict=True):
        own, source = (look @ own + own) / 2, (look @ source + source) / 2
        own, source = own / 2, (source + cross @ of_encoder) / 2
        owns.append(own)
        sources.append(source)
    return AttentionRollout(sequence=torch.stack(owns), source=torch.stack(sources))
