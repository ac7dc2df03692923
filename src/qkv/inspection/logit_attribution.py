"""Compute how much the embedding, each head and each feed-forward layer contribute directly to a logit.

The contributions sum exactly to the logit because all nonlinear operations are frozen at their values in this forward
pass. In a pre-norm model, only the scale of the final norm is frozen. In a post-norm model, the scale of every norm
that a component passes through is frozen. In BERT's masked-word head, the activation's gate, activation(z) / z, is
also frozen. If a component affects later layers, the effect is attributed to those layers.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import AttentionStack, NormPosition
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, get_attention, get_blocks
from qkv.inspection.model_input import mark_whitespace
from qkv.inspection.residual_stream import head_outputs
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn.block import activate
from qkv.nn.norm import LayerNorm, Norm
from qkv.text import Tokenizer
from qkv.text.token_display import token_text_or_vocabulary_name

ComponentVectors = Float[Tensor, "part d_model"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LogitAttribution(ShortRepr):
    """The contributions to one logit or to the difference between two logits."""

    position: int
    token_id: int
    against: int | None
    label: str
    """The label of the token, or of both tokens for a difference."""
    names: list[str]
    """The component names: `embedding`, `layer 3 head 1`, `layer 3 cross head 0`, `layer 3 feed_forward`, `biases`."""
    values: Float[Tensor, " part"]
    logit: float
    """The model's logit (or the difference), which is the sum of the contributions."""


@torch.no_grad()
def logit_attribution(
    cache: ActivationCache, tokenizer: Tokenizer, *, position: int, token_id: int, against: int | None = None
) -> LogitAttribution:
    """Compute how much each of the model's components contributes to the logit of `token_id` at a position.

    If `against` is given, the logit of that id is subtracted, and the difference is attributed.
    """
    if isinstance(cache.model, RNNSeq2Seq):
        raise InputError("logit attribution requires a residual stream, which an RNN does not have")
    logits = cache.logits
    if logits is None:
        raise InputError("this BERT has no masked-word head, which logit attribution requires")
    position = check_index("position", position, len(logits), unit="tokens", from_end=True)
    for vocab_id in (token_id, token_id if against is None else against):
        check_index("id", vocab_id, logits.shape[1], unit="vocabulary ids")
    names, vectors = _final_norm_output_contributions(cache, position)
    vectors, direction, bias = _unembedding_inputs_row_and_bias(cache.model, vectors, token_id)
    values, logit = vectors @ direction, logits[position, token_id]
    if against is not None:
        _, other, other_bias = _unembedding_inputs_row_and_bias(cache.model, vectors[:0], against)
        values, bias, logit = vectors @ (direction - other), bias - other_bias, logit - logits[position, against]
    values[-1] += bias
    label = " − ".join(
        mark_whitespace(token_text_or_vocabulary_name(tokenizer, vocab_id))
        for vocab_id in (token_id, against)
        if vocab_id is not None
    )
    return LogitAttribution(
        position=position,
        token_id=token_id,
        against=against,
        label=label,
        names=names,
        values=values,
        logit=float(logit),
    )


def _final_norm_output_contributions(cache: ActivationCache, position: int) -> tuple[list[str], ComponentVectors]:
    """Return each component's contribution to the final norm's output. The last component is the norms' biases."""
    model = cache.model
    stack = AttentionStack.DECODER if isinstance(model, Seq2Seq) else AttentionStack.SELF
    prefix = "decoder." if stack is AttentionStack.DECODER else ""
    names = ["biases", "embedding"]
    start = cache.get_activation(f"{prefix}blocks.0.resid_pre")[position]
    parts = torch.stack([torch.zeros_like(start), start])
    for layer, block in enumerate(get_blocks(model, stack)):
        for sublayer in (
            ("attention", "cross_attention", "feed_forward")
            if block.cross_attention is not None
            else ("attention", "feed_forward")
        ):
            if sublayer == "feed_forward":
                outputs, output_names = (
                    cache.get_activation(f"{prefix}blocks.{layer}.feed_forward_out")[position][None],
                    [sublayer],
                )
            else:
                attention_stack = AttentionStack.CROSS if sublayer == "cross_attention" else stack
                outputs, bias = (
                    head_outputs(cache, attention_stack, layer)[:, position],
                    getattr(get_attention(model, attention_stack, layer).out_proj, "bias", None),
                )
                parts[0] += 0 if bias is None else bias
                output_names = [
                    f"{'cross ' if sublayer == 'cross_attention' else ''}head {head}" for head in range(len(outputs))
                ]
            parts = torch.cat((parts, outputs))
            names += [f"layer {layer} {name}" for name in output_names]
            if block.norm_position is NormPosition.POST:
                parts = _apply_frozen_norm(getattr(block, f"{sublayer}_norm"), parts)
    parts = _apply_frozen_norm(_get_final_norm(model), parts)
    return [*names[1:], names[0]], torch.cat((parts[1:], parts[:1]))


def _get_final_norm(model: Model) -> nn.Module:
    match model:
        case Seq2Seq():
            return model.decoder.final_norm
        case GPT() | BERT():
            return model.final_norm
        case RNNSeq2Seq():
            raise AssertionError


def _apply_frozen_norm(norm: nn.Module, parts: ComponentVectors) -> ComponentVectors:
    """Apply a norm to the components as a linear map, using the scale for the sum of the components.

    The norm's bias β is added to the first component.
    """
    total = parts.sum(0)
    if isinstance(norm, nn.Identity):
        return parts
    assert isinstance(norm, Norm)
    if isinstance(norm, LayerNorm):
        parts = parts - parts.mean(-1, keepdim=True)
    parts = parts * norm.scale(total) * norm.weight
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        parts = torch.cat((parts[:1] + norm.bias, parts[1:]))
    return parts


def _unembedding_inputs_row_and_bias(
    model: Model, parts: ComponentVectors, token_id: int
) -> tuple[ComponentVectors, Float[Tensor, " d_model"], Tensor]:
    """Return the components of the unembedding's input, the token's row of the unembedding matrix, and its bias."""
    match model:
        case BERT():
            head = model.masked_lm
            assert head is not None
            if len(parts):
                # The biases are the last component here, but `_apply_frozen_norm` expects them to be the first.
                z = parts @ head.dense.weight.T
                z[-1] += head.dense.bias
                total = z.sum(0)
                gate = activate(total, head.activation) / torch.where(total == 0, torch.ones_like(total), total)
                parts = _apply_frozen_norm(head.norm, (z * gate).roll(1, 0)).roll(-1, 0)
            unembedding = head.unembedding
        case GPT() | Seq2Seq():
            unembedding = model.unembedding
        case RNNSeq2Seq():
            raise AssertionError
    bias = unembedding.weight.new_zeros(()) if unembedding.bias is None else unembedding.bias[token_id]
    return parts, unembedding.weight[token_id] * unembedding.scale, bias
