"""Compute one query's attention weights step by step: dot products, scaling, masking and softmax."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionStack, NormPosition
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, get_attention, get_blocks, upcast
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import RNNSeq2Seq


@dataclass(frozen=True, kw_only=True, repr=False)
class NeuronView(ShortRepr):
    """The steps of the attention computation for one query in one head, similar to BertViz's neuron view."""

    stack: AttentionStack
    layer: int
    head: int
    query: int
    query_label: str
    keys: list[str]
    q: Float[Tensor, " d_head"]
    """The query vector after rotary position embedding."""
    q_unrotated: Float[Tensor, " d_head"]
    """The query vector before rotary position embedding. It equals `q` in models without rotary positions."""
    k: Float[Tensor, "key d_head"]
    k_unrotated: Float[Tensor, "key d_head"]
    products: Float[Tensor, "key d_head"]
    """The elementwise product of the query with each key."""
    dots: Float[Tensor, " key"]
    scaled: Float[Tensor, " key"]
    """The dot products times the attention scale, plus the position bias if the model has one."""
    scores: Float[Tensor, " key"]
    """The scores after masking, with −∞ at masked positions."""
    weights: Float[Tensor, " key"]


@torch.no_grad()
def compute_neuron_view(
    cache: ActivationCache, stack: AttentionStack | None = None, *, layer: int = 0, head: int = 0, query: int = -1
) -> NeuronView:
    """Compute the attention weights of one query step by step. `query` defaults to the last position."""
    if isinstance(cache.model, RNNSeq2Seq):
        raise InputError("the neuron view requires heads with separate queries and keys, which an RNN does not have")
    stack = stack or cache.stacks[0]
    n, attention = len(cache.query_labels(stack)), get_attention(cache.model, stack, layer)
    head = check_index("head", head, attention.head_config.n_heads, unit="heads")
    query = check_index("query", query, n, unit="positions", from_end=True)
    records = cache.attention_records(stack, layer)
    queries = torch.cat([record.inputs.queries[0, head] for record in records])
    kv_head = head // (attention.head_config.n_heads // attention.head_config.n_kv_heads)
    q, k = upcast(queries[query]), upcast(records[-1].inputs.keys[0, kv_head])
    q_unrotated, k_unrotated = _unrotated_queries_and_keys(cache, stack, layer, (head, kv_head))
    scores = cache.scores(stack, layer)[head, query]
    dots = k @ q
    # `scores` includes the position bias, but is −∞ at masked positions.
    scaled = torch.where(scores.isfinite(), scores, dots * attention.scale)
    return NeuronView(
        stack=stack,
        layer=layer,
        head=head,
        query=query,
        query_label=cache.query_labels(stack)[query],
        keys=cache.key_labels(stack),
        q=q,
        q_unrotated=q_unrotated[query],
        k=k,
        k_unrotated=k_unrotated,
        products=k * q,
        dots=dots,
        scaled=scaled,
        scores=scores,
        weights=cache.weights(stack, layer)[head, query],
    )


def _unrotated_queries_and_keys(
    cache: ActivationCache, stack: AttentionStack, layer: int, heads: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return one head's projected queries and keys before rotary position embedding."""
    block, attention = get_blocks(cache.model, stack)[layer], get_attention(cache.model, stack, layer)
    block_name = cache.attention_tap(stack, layer).rpartition(".")[0]
    if stack is AttentionStack.CROSS:
        # Cross-attention does not use rotary positions, so the recorded queries and keys are not rotated.
        records = cache.attention_records(stack, layer)
        return torch.cat([record.inputs.queries[0, heads[0]] for record in records]), records[-1].inputs.keys[
            0, heads[1]
        ]
    x = cache.get_activation(f"{block_name}.resid_pre")
    if block.norm_position is NormPosition.PRE:
        x = block.attention_norm(x[None])[0]
    d = attention.head_config.d_head
    q, k = attention.q_proj(x), attention.k_proj(x)
    q, k = upcast(q), upcast(k)
    return q[:, heads[0] * d : (heads[0] + 1) * d], k[:, heads[1] * d : (heads[1] + 1) * d]
