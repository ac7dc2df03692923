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
from qkv.inspection.brief import Brief
from qkv.inspection.places import inside
from qkv.inspection.reading import label
from qkv.inspection.seeing import Seen, attention_of, blocks_of
from qkv.inspection.stream import head_writes
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import LayerNorm, RMSNorm, activate
from qkv.text import Tokenizer
from qkv.text.showing import text_of

Vectors = Float[Tensor, "part d_model"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Contributions(Brief):
    """Parts of one logit, or of the difference of two."""

    position: int
    token_id: int
    against: int | None
    said: str
    """The token as it is shown; of a difference, both."""
    names: list[str]
    """`embedding`, `layer 3 head 1`, `layer 3 cross head 0`, `layer 3 feedforward`, `biases`."""
    values: Float[Tensor, " part"]
    logit: float
    """What the model gave; the parts sum to it."""


@torch.no_grad()
def contributions(
    seen: Seen, tokenizer: Tokenizer, *, position: int, token_id: int, against: int | None = None
) -> Contributions:
    """To the logit of `token_id` at a position; `against`: minus the logit of that other id."""
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("an RNN's parts are not added to a stream: its logits cannot be parted by layers and heads")
    logits = seen.logits
    if logits is None:
        raise InputError("this BERT has no masked-word head, so there is no logit to explain")
    position = inside("position", position, len(logits), of="tokens", from_end=True)
    for one in (token_id, token_id if against is None else against):
        inside("id", one, logits.shape[1], of="ids of the vocabulary")
    names, vectors = _at_the_top(seen, position)
    vectors, direction, bias = _through_head(seen.model, vectors, token_id)
    values, logit = vectors @ direction, logits[position, token_id]
    if against is not None:
        _, other, other_bias = _through_head(seen.model, vectors[:0], against)
        values, bias, logit = vectors @ (direction - other), bias - other_bias, logit - logits[position, against]
    values[-1] += bias
    said = " − ".join(label(text_of(tokenizer, one)) for one in (token_id, against) if one is not None)
    return Contributions(
        position=position, token_id=token_id, against=against, said=said, names=names, values=values, logit=float(logit)
    )  # fmt: skip


def _at_the_top(seen: Seen, position: int) -> tuple[list[str], Vectors]:
    """Every part's share of the stream that the last norm gives out; the last part is the biases of norms."""
    model = seen.model
    stack = Stack.DECODER if isinstance(model, Seq2Seq) else Stack.SELF
    before = "decoder." if stack is Stack.DECODER else ""
    names = ["biases", "embedding"]
    start = seen.stream(f"{before}blocks.0.residual_pre")[position]
    parts = torch.stack([torch.zeros_like(start), start])
    for layer, block in enumerate(blocks_of(model, stack)):
        for kind in ("attention", "cross", "feedforward") if block.cross is not None else ("attention", "feedforward"):
            if kind == "feedforward":
                own, own_names = seen.stream(f"{before}blocks.{layer}.feedforward_write")[position][None], [kind]
            else:
                of = Stack.CROSS if kind == "cross" else stack
                own, bias = (
                    head_writes(seen, of, layer)[:, position],
                    getattr(attention_of(model, of, layer).output, "bias", None),
                )
                parts[0] += 0 if bias is None else bias
                own_names = [f"{'cross ' if kind == 'cross' else ''}head {head}" for head in range(len(own))]
            parts = torch.cat((parts, own))
            names += [f"layer {layer} {name}" for name in own_names]
            if block.norm_position is NormPosition.POST:
                parts = _frozen(getattr(block, f"{kind}_norm"), parts)
    parts = _frozen(_final_norm(model), parts)
    return [*names[1:], names[0]], torch.cat((parts[1:], parts[:1]))


def _final_norm(model: Model) -> nn.Module:
    match model:
        case Seq2Seq():
            return model.decoder.final_norm
        case GPT() | BERT():
            return model.final_norm
        case RNNSeq2Seq():
            raise AssertionError


def _frozen(norm: nn.Module, parts: Vectors) -> Vectors:
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


def _through_head(model: Model, parts: Vectors, token_id: int) -> tuple[Vectors, Float[Tensor, " d_model"], Tensor]:
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
                parts = _frozen(head.norm, (z * gate).roll(1, 0)).roll(-1, 0)
            unembedding = head.unembedding
        case GPT() | Seq2Seq():
            unembedding = model.unembedding
        case RNNSeq2Seq():
            raise AssertionError
    bias = unembedding.weight.new_zeros(()) if unembedding.bias is None else unembedding.bias[token_id]
    return parts, unembedding.weight[token_id] * unembedding.scale, bias
