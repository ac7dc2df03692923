"""Attention as tables one can read: a head, a mean, words for tokens, without the sink, by what is really moved."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.choices import HeadLayout, Stack
from qkv.errors import InputError
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.inspection.model_input import TokenizedText, mark_whitespace
from qkv.inspection.activation_cache import ActivationCache, get_attention
from qkv.models import RNNSeq2Seq
from qkv.nn import Attention

AttentionMatrix = Float[Tensor, "query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMapView(ShortRepr):
    """View C: who looks at whom."""

    weights: AttentionMatrix
    queries: list[str]
    keys: list[str]
    title: str
    is_share: bool = True
    """Rows sum to 1; False for norms."""


def attention_map(
    seen: ActivationCache, stack: Stack | None = None, *, layer: int | None = None, head: int | None = None
) -> AttentionMapView:
    """One head's weights; the mean of all heads and of all layers where none is said."""
    stack = stack or seen.stacks[0]
    layers = range(seen.n_layers(stack)) if layer is None else [layer]
    weights = torch.stack([select_head(seen.weights(stack, one), head) for one in layers]).mean(0)
    return AttentionMapView(
        weights=weights, queries=seen.query_labels(stack), keys=seen.key_labels(stack), title=_attention_map_title(stack, layer, head)
    )  # fmt: skip


@torch.no_grad()
def value_weighted_attention(seen: ActivationCache, stack: Stack, *, layer: int) -> Float[Tensor, "head query key"]:
    """‖a_ij · v_j W_O‖: how much a head really moves from key to query (arXiv:2004.10102).

    W_O is the head's own part of the output projection; its bias comes from no key and is left out.
    """
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("value-weighted attention is of a Transformer's heads; an RNN's values are its states")
    attention = get_attention(seen.model, stack, layer)
    last = seen.attention_records(stack, layer)[-1]
    values = last.lookup.values[0].repeat_interleave(attention.head_config.n_heads // attention.head_config.n_kv_heads, dim=0)
    sizes = project_head_results(attention, values).norm(dim=-1)
    return seen.weights(stack, layer) * sizes[:, None]


def project_head_results(
    attention: Attention, results: Float[Tensor, "head position d_value"]
) -> Float[Tensor, "head position d_model"]:
    """What each head's result becomes by the output projection: its share of what is written, without the bias."""
    n_heads, d_value = attention.head_config.n_heads, attention.head_config.d_value
    is_split = attention.head_config.layout is HeadLayout.SPLIT
    if not isinstance(attention.out_proj, torch.nn.Linear):
        if not is_split:
            return results / (n_heads if attention.head_config.layout is HeadLayout.POOLED_MEAN else 1)
        parts = results.new_zeros(n_heads, results.shape[1], n_heads * d_value)
        for head in range(n_heads):
            parts[head, :, head * d_value : (head + 1) * d_value] = results[head]
        return parts
    weight = attention.out_proj.weight.T
    if is_split:
        return torch.einsum("hnv,hvd->hnd", results, weight.view(n_heads, d_value, -1))
    written = results @ weight
    return written / n_heads if attention.head_config.layout is HeadLayout.POOLED_MEAN else written


def merge_subwords(view: AttentionMapView, queries: TokenizedText, keys: TokenizedText) -> AttentionMapView:
    """Words for tokens: weights to a word's tokens are summed, rows of a word's tokens averaged (arXiv:1906.04341)."""
    rows, row_labels = _group_tokens_by_word(queries)
    columns, column_labels = _group_tokens_by_word(keys)
    weights = view.weights @ columns.to(view.weights)
    weights = (rows.to(weights) / rows.sum(0).to(weights)).T @ weights
    return replace(view, weights=weights, queries=row_labels, keys=column_labels, title=f"{view.title}, words")


def refine_map(view: AttentionMapView, queries: TokenizedText, keys: TokenizedText, *, words: bool = False, sink: bool = True) -> AttentionMapView:
    """`words`: for tokens; `sink`: False leaves it out, and what is left of each row is a share."""
    if not sink:
        rest = remove_sink(view.weights, sink_mask(keys))
        view = replace(view, weights=rest, title=f"{view.title}, without the sink", is_share=True)
    return merge_subwords(view, queries, keys) if words else view


def remove_sink(weights: Float[Tensor, "*rows key"], sink: Bool[Tensor, " key"]) -> Float[Tensor, "*rows key"]:
    """The rest of each row, renormalised; a row that had nothing else is left as zeros."""
    kept = weights.masked_fill(sink.to(weights.device), 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)


def sink_mask(tokens: TokenizedText) -> Bool[Tensor, " key"]:
    """Where weight goes that has nowhere better to go: the first position and every special token."""
    return torch.tensor([place == 0 or special for place, special in enumerate(tokens.is_special)])


def _group_tokens_by_word(tokens: TokenizedText) -> tuple[Float[Tensor, "token group"], list[str]]:
    """Which tokens make a word; a token of no word is by itself."""
    names: list[str] = []
    group_of: list[int] = []
    before: int | None = None
    for token, word in zip(tokens.tokens, tokens.word_ids, strict=True):
        if word is not None and word == before:
            names[-1] += token.lstrip()
        else:
            names.append(mark_whitespace(token.strip() or token))
        before = word
        group_of.append(len(names) - 1)
    return torch.nn.functional.one_hot(torch.tensor(group_of), len(names)).float(), names


def select_head(weights: Float[Tensor, "head query key"], head: int | None) -> AttentionMatrix:
    """One of them, or their mean."""
    return weights.mean(0) if head is None else weights[check_index("head", head, len(weights), of="heads")]


def _attention_map_title(stack: Stack, layer: int | None, head: int | None) -> str:
    of_layer = "mean of all layers" if layer is None else f"layer {layer}"
    of_head = "mean of all heads" if head is None else f"head {head}"
    return f"{stack}: {of_layer}, {of_head}"
