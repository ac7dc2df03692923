"""Who made this logit? The direct contribution of the embedding, of every head and of every feed-forward.

Exact: the parts sum to the logit, because all that is not linear is frozen as it was in this pass. Of a pre-norm
model that is the last norm's scale alone. Of a post-norm model it is the scale of every norm that a part passes on
its way up, and in BERT's masked-word head also the activation's gate (activation(z) / z). A part counts with
what it adds itself; what it changes in later layers is theirs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import NormPosition, Stack
from qkv.errors import InputError
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.inspection.model_input import mark_whitespace
from qkv.inspection.activation_cache import ActivationCache, get_attention, get_blocks
from qkv.inspection.residual_stream import head_outputs
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import LayerNorm, RMSNorm, activate
from qkv.text import Tokenizer
from qkv.text.token_display import token_text

ComponentVectors = Float[Tensor, "part d_model"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LogitAttribution(ShortRepr):
    """Parts of one logit, or of the difference of two."""

    position: int
    token_id: int
    against: int | None
    label: str
    """The token as it is shown; of a difference, both."""
    names: list[str]
    """`embedding`, `layer 3 head 1`, `layer 3 cross head 0`, `layer 3 feed_forward`, `biases`."""
    values: Float[Tensor, " part"]
    logit: float
    """What the model gave; the parts sum to it."""


@torch.no_grad()
def logit_attribution(
    seen: ActivationCache, tokenizer: Tokenizer, *, position: int, token_id: int, against: int | None = None
) -> LogitAttribution:
    """To the logit of `token_id` at a position; `against`: minus the logit of that other id."""
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("an RNN's parts are not added to a stream: its logits cannot be parted by layers and heads")
    logits = seen.logits
    if logits is None:
        raise InputError("this BERT has no masked-word head, so there is no logit to explain")
    position = check_index("position", position, len(logits), of="tokens", from_end=True)
    for one in (token_id, token_id if against is None else against):
        check_index("id", one, logits.shape[1], of="ids of the vocabulary")
    names, vectors = _residual_contributions(seen, position)
    vectors, direction, bias = _apply_output_head(seen.model, vectors, token_id)
    values, logit = vectors @ direction, logits[position, token_id]
    if against is not None:
        _, other, other_bias = _apply_output_head(seen.model, vectors[:0], against)
        values, bias, logit = vectors @ (direction - other), bias - other_bias, logit - logits[position, against]
    values[-1] += bias
    said = " − ".join(mark_whitespace(token_text(tokenizer, one)) for one in (token_id, against) if one is not None)
    return LogitAttribution(
        position=position, token_id=token_id, against=against, label=said, names=names, values=values, logit=float(logit)
    )  # fmt: skip


def _residual_contributions(seen: ActivationCache, position: int) -> tuple[list[str], ComponentVectors]:
    """Every part's share of the stream that the last norm gives out; the last part is the biases of norms."""
    model = seen.model
    stack = Stack.DECODER if isinstance(model, Seq2Seq) else Stack.SELF
    before = "decoder." if stack is Stack.DECODER else ""
    names = ["biases", "embedding"]
    start = seen.get_activation(f"{before}blocks.0.resid_pre")[position]
    parts = torch.stack([torch.zeros_like(start), start])
    for layer, block in enumerate(get_blocks(model, stack)):
        for kind in ("attention", "cross_attention", "feed_forward") if block.cross_attention is not None else ("attention", "feed_forward"):
            if kind == "feed_forward":
                own, own_names = seen.get_activation(f"{before}blocks.{layer}.feed_forward_out")[position][None], [kind]
            else:
                of = Stack.CROSS if kind == "cross_attention" else stack
                own, bias = (
                    head_outputs(seen, of, layer)[:, position],
                    getattr(get_attention(model, of, layer).out_proj, "bias", None),
                )
                parts[0] += 0 if bias is None else bias
                own_names = [f"{'cross ' if kind == 'cross_attention' else ''}head {head}" for head in range(len(own))]
            parts = torch.cat((parts, own))
            names += [f"layer {layer} {name}" for name in own_names]
            if block.norm_position is NormPosition.POST:
                parts = _apply_frozen_norm(getattr(block, f"{kind}_norm"), parts)
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
    """The norm of the sum, as a linear map of its parts; β goes to the first part, the biases."""
    whole = parts.sum(0)
    match norm:
        case LayerNorm():
            parts = parts - parts.mean(-1, keepdim=True)
            scale = (whole.var(correction=0) + norm.epsilon).rsqrt()
            bias = norm.bias
        case RMSNorm():
            scale, bias = (whole.square().mean() + norm.epsilon).rsqrt(), None
        case _:
            return parts
    parts = parts * scale * norm.weight
    if bias is not None:
        parts = torch.cat((parts[:1] + bias, parts[1:]))
    return parts


def _apply_output_head(model: Model, parts: ComponentVectors, token_id: int) -> tuple[ComponentVectors, Float[Tensor, " d_model"], Tensor]:
    """Parts as the unembedding meets them, the row they meet, and its bias."""
    match model:
        case BERT():
            head = model.masked_word
            assert head is not None
            if len(parts):
                # The biases stand last here, and first in `_frozen`.
                z = parts @ head.dense.weight.T
                z[-1] += head.dense.bias
                whole = z.sum(0)
                gate = activate(whole, head.activation) / torch.where(whole == 0, torch.ones_like(whole), whole)
                parts = _apply_frozen_norm(head.norm, (z * gate).roll(1, 0)).roll(-1, 0)
            unembedding = head.unembedding
        case GPT() | Seq2Seq():
            unembedding = model.unembedding
        case RNNSeq2Seq():
            raise AssertionError
    bias = unembedding.weight.new_zeros(()) if unembedding.bias is None else unembedding.bias[token_id]
    return parts, unembedding.weight[token_id] * unembedding.scale, bias
