"""Attention as tables one can read: a head, a mean, words for tokens, without the sink, by what is really moved."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.choices import HeadLayout, Stack
from qkv.errors import InputError
from qkv.inspection.brief import Brief
from qkv.inspection.places import inside
from qkv.inspection.reading import Tokens, label
from qkv.inspection.seeing import Seen, attention_of
from qkv.models import RNNSeq2Seq
from qkv.nn import Attention

Table = Float[Tensor, "query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class MapView(Brief):
    """View C: who looks at whom."""

    weights: Table
    queries: list[str]
    keys: list[str]
    title: str
    is_share: bool = True
    """Rows sum to 1; False for norms."""


def attention_map(
    seen: Seen, stack: Stack | None = None, *, layer: int | None = None, head: int | None = None
) -> MapView:
    """One head's weights; the mean of all heads and of all layers where none is said."""
    stack = stack or seen.stacks[0]
    layers = range(seen.n_layers(stack)) if layer is None else [layer]
    weights = torch.stack([of_heads(seen.weights(stack, one), head) for one in layers]).mean(0)
    return MapView(
        weights=weights, queries=seen.queries(stack), keys=seen.keys(stack), title=_title(stack, layer, head)
    )  # fmt: skip


@torch.no_grad()
def value_weighted(seen: Seen, stack: Stack, *, layer: int) -> Float[Tensor, "head query key"]:
    """‖a_ij · v_j W_O‖: how much a head really moves from key to query (arXiv:2004.10102).

    W_O is the head's own part of the output projection; its bias comes from no key and is left out.
    """
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("value-weighted attention is of a Transformer's heads; an RNN's values are its states")
    attention = attention_of(seen.model, stack, layer)
    last = seen.looks(stack, layer)[-1]
    values = last.lookup.values[0].repeat_interleave(attention.shape.n_heads // attention.shape.n_kv_heads, dim=0)
    sizes = through_output(attention, values).norm(dim=-1)
    return seen.weights(stack, layer) * sizes[:, None]


def through_output(
    attention: Attention, results: Float[Tensor, "head position d_value"]
) -> Float[Tensor, "head position d_model"]:
    """What each head's result becomes by the output projection: its share of what is written, without the bias."""
    n_heads, d_value = attention.shape.n_heads, attention.shape.d_value
    is_split = attention.shape.layout is HeadLayout.SPLIT
    if not isinstance(attention.output, torch.nn.Linear):
        if not is_split:
            return results / (n_heads if attention.shape.layout is HeadLayout.POOLED_MEAN else 1)
        parts = results.new_zeros(n_heads, results.shape[1], n_heads * d_value)
        for head in range(n_heads):
            parts[head, :, head * d_value : (head + 1) * d_value] = results[head]
        return parts
    weight = attention.output.weight.T
    if is_split:
        return torch.einsum("hnv,hvd->hnd", results, weight.view(n_heads, d_value, -1))
    written = results @ weight
    return written / n_heads if attention.shape.layout is HeadLayout.POOLED_MEAN else written


def merge_words(view: MapView, queries: Tokens, keys: Tokens) -> MapView:
    """Words for tokens: weights to a word's tokens are summed, rows of a word's tokens averaged (arXiv:1906.04341)."""
    rows, row_labels = _groups(queries)
    columns, column_labels = _groups(keys)
    weights = view.weights @ columns.to(view.weights)
    weights = (rows.to(weights) / rows.sum(0).to(weights)).T @ weights
    return replace(view, weights=weights, queries=row_labels, keys=column_labels, title=f"{view.title}, words")


def refined(view: MapView, queries: Tokens, keys: Tokens, *, words: bool = False, sink: bool = True) -> MapView:
    """`words`: for tokens; `sink`: False leaves it out, and what is left of each row is a share."""
    if not sink:
        rest = without_sink(view.weights, sink_of(keys))
        view = replace(view, weights=rest, title=f"{view.title}, without the sink", is_share=True)
    return merge_words(view, queries, keys) if words else view


def without_sink(weights: Float[Tensor, "*rows key"], sink: Bool[Tensor, " key"]) -> Float[Tensor, "*rows key"]:
    """The rest of each row, renormalised; a row that had nothing else is left as zeros."""
    kept = weights.masked_fill(sink.to(weights.device), 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)


def sink_of(tokens: Tokens) -> Bool[Tensor, " key"]:
    """Where weight goes that has nowhere better to go: the first position and every special token."""
    return torch.tensor([place == 0 or special for place, special in enumerate(tokens.is_special)])


def _groups(tokens: Tokens) -> tuple[Float[Tensor, "token group"], list[str]]:
    """Which tokens make a word; a token of no word is by itself."""
    names: list[str] = []
    group_of: list[int] = []
    before: int | None = None
    for token, word in zip(tokens.tokens, tokens.words, strict=True):
        if word is not None and word == before:
            names[-1] += token.lstrip()
        else:
            names.append(label(token.strip() or token))
        before = word
        group_of.append(len(names) - 1)
    return torch.nn.functional.one_hot(torch.tensor(group_of), len(names)).float(), names


def of_heads(weights: Float[Tensor, "head query key"], head: int | None) -> Table:
    """One of them, or their mean."""
    return weights.mean(0) if head is None else weights[inside("head", head, len(weights), of="heads")]


def _title(stack: Stack, layer: int | None, head: int | None) -> str:
    of_layer = "mean of all layers" if layer is None else f"layer {layer}"
    of_head = "mean of all heads" if head is None else f"head {head}"
    return f"{stack}: {of_layer}, {of_head}"
