"""Compute attention rollout, which multiplies attention weights across layers."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionStack
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache
from qkv.inspection.short_repr import ShortRepr
from qkv.models import RNNSeq2Seq


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionRollout(ShortRepr):
    """The share of each input token in each token's state after each layer.

    For each layer and token, the shares in `sequence` and `source` together sum to 1.
    """

    sequence: Float[Tensor, "layer query key"]
    source: Float[Tensor, "layer query source"] | None
    """The share of each source token for a decoder, otherwise `None`."""


def rollout_from_means(means: Float[Tensor, "layer query key"]) -> Float[Tensor, "layer query key"]:
    """Compute attention rollout from each layer's head average (arXiv:2005.00928).

    This multiplies Â = ½ head average + ½ identity across layers. The identity represents the residual connection.
    """
    share = torch.eye(means.shape[-1], dtype=means.dtype, device=means.device)
    shares = []
    for layer in means:
        share = (layer @ share + share) / 2
        shares.append(share)
    return torch.stack(shares)


def attention_rollout(cache: ActivationCache, stack: AttentionStack | None = None) -> AttentionRollout:
    """Compute attention rollout for a GPT, BERT, encoder or decoder.

    Cross-attention in a decoder is treated in the same way as self-attention: half of each token's shares come from the
    residual connection and half from the attended source states.
    """
    if isinstance(cache.model, RNNSeq2Seq):
        raise InputError("attention rollout requires a Transformer, got an RNN")
    stack = stack or cache.stacks[0]
    if stack in (AttentionStack.SELF, AttentionStack.ENCODER):
        return AttentionRollout(sequence=rollout_from_means(cache.mean_weights(stack)), source=None)
    encoder_rollout = rollout_from_means(cache.mean_weights(AttentionStack.ENCODER))[-1]
    self_weights, cross_weights = cache.mean_weights(AttentionStack.DECODER), cache.mean_weights(AttentionStack.CROSS)
    n = self_weights.shape[-1]
    sequence = torch.eye(n, dtype=self_weights.dtype, device=self_weights.device)
    source = self_weights.new_zeros(n, encoder_rollout.shape[-1])
    sequence_shares, source_shares = [], []
    for weights, cross in zip(self_weights, cross_weights, strict=True):
        sequence, source = (weights @ sequence + sequence) / 2, (weights @ source + source) / 2
        sequence, source = sequence / 2, (source + cross @ encoder_rollout) / 2
        sequence_shares.append(sequence)
        source_shares.append(source)
    return AttentionRollout(sequence=torch.stack(sequence_shares), source=torch.stack(source_shares))
