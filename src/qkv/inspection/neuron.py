"""How does one query come to its weights? Number by number: q, k, their product, scale, mask, softmax."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import NormPosition, Stack
from qkv.errors import InputError
from qkv.inspection.brief import Brief
from qkv.inspection.places import inside
from qkv.inspection.seeing import Seen, attention_of, blocks_of, precise
from qkv.models import RNNSeq2Seq


@dataclass(frozen=True, kw_only=True, repr=False)
class NeuronView(Brief):
    """View D: one query of one head."""

    stack: Stack
    layer: int
    head: int
    query: int
    query_label: str
    keys: list[str]
    q: Float[Tensor, " d_head"]
    """As it meets the keys: after rotary positions."""
    q_before: Float[Tensor, " d_head"]
    """Before them; the same where the model has none."""
    k: Float[Tensor, "key d_head"]
    k_before: Float[Tensor, "key d_head"]
    products: Float[Tensor, "key d_head"]
    """q·k dimension by dimension."""
    dots: Float[Tensor, " key"]
    scaled: Float[Tensor, " key"]
    """times 1/√d, plus a bias of positions where the model has one."""
    scores: Float[Tensor, " key"]
    """With the mask: −∞ where the look is forbidden."""
    weights: Float[Tensor, " key"]


@torch.no_grad()
def neuron(seen: Seen, stack: Stack | None = None, *, layer: int = 0, head: int = 0, query: int = -1) -> NeuronView:
    """`query`: its position; −1: the last."""
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("an RNN's look has no heads with queries and keys of their own")
    stack = stack or seen.stacks[0]
    n, attention = len(seen.queries(stack)), attention_of(seen.model, stack, layer)
    head = inside("head", head, attention.shape.n_heads, of="heads")
    query = inside("query", query, n, of="positions", from_end=True)
    looks = seen.looks(stack, layer)
    queries = torch.cat([one.lookup.queries[0, head] for one in looks])
    kv_head = head // (attention.shape.n_heads // attention.shape.n_kv_heads)
    q, k = precise(queries[query]), precise(looks[-1].lookup.keys[0, kv_head])
    q_before, k_before = _before(seen, stack, layer, (head, kv_head))
    scores = seen.scores(stack, layer)[head, query]
    dots = k @ q
    # What a bias of positions adds is known where the look is allowed.
    scaled = torch.where(scores.isfinite(), scores, dots * attention.scale)
    return NeuronView(
        stack=stack, layer=layer, head=head, query=query, query_label=seen.queries(stack)[query],
        keys=seen.keys(stack), q=q, q_before=q_before[query], k=k, k_before=k_before, products=k * q, dots=dots,
        scaled=scaled, scores=scores, weights=seen.weights(stack, layer)[head, query],
    )  # fmt: skip


def _before(seen: Seen, stack: Stack, layer: int, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head as the projections give them."""
    block, attention = blocks_of(seen.model, stack)[layer], attention_of(seen.model, stack, layer)
    owner = seen.tap(stack, layer).rpartition(".")[0]
    if stack is Stack.CROSS:
        # The source is read without rotary positions: what meets is what was projected.
        last = seen.looks(stack, layer)
        return torch.cat([one.lookup.queries[0, heads[0]] for one in last]), last[-1].lookup.keys[0, heads[1]]
    x = seen.stream(f"{owner}.residual_pre")
    if block.norm_position is NormPosition.PRE:
        x = block.attention_norm(x[None])[0]
    d = attention.shape.d_head
    q, k = attention.query(x), attention.key(x)
    q, k = precise(q), precise(k)
    return q[:, heads[0] * d : (heads[0] + 1) * d], k[:, heads[1] * d : (heads[1] + 1) * d]
