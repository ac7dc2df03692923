"""Compute query-by-key attention maps of single heads or averaged over heads.

Optionally, the maps merge subwords into words, omit attention sinks, or are weighted by value norms.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.choices import AttentionStack, HeadCombination
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, get_attention
from qkv.inspection.model_input import TokenizedText, mark_whitespace
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import RNNSeq2Seq
from qkv.nn import Attention

AttentionMatrix = Float[Tensor, "query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMapView(ShortRepr):
    """Attention weights between labeled queries and keys."""

    weights: AttentionMatrix
    queries: list[str]
    keys: list[str]
    title: str
    is_share: bool = True
    """Whether each row sums to 1, which is not the case for norms."""


def attention_map(
    cache: ActivationCache, stack: AttentionStack | None = None, *, layer: int | None = None, head: int | None = None
) -> AttentionMapView:
    """Return the attention weights of one head. By default, the weights are averaged over all heads and layers."""
    stack = stack or cache.stacks[0]
    layers = range(cache.n_layers(stack)) if layer is None else [layer]
    weights = torch.stack([select_head(cache.weights(stack, index), head) for index in layers]).mean(0)
    return AttentionMapView(
        weights=weights,
        queries=cache.query_labels(stack),
        keys=cache.key_labels(stack),
        title=_attention_map_title(stack, layer, head),
    )


@torch.no_grad()
def value_weighted_attention(
    cache: ActivationCache, stack: AttentionStack, *, layer: int
) -> Float[Tensor, "head query key"]:
    """Return ‖a_ij · v_j W_O‖, the norm of the vector that a head moves from key j to query i (arXiv:2004.10102).

    W_O is the head's slice of the output projection. The bias is omitted because it does not depend on the key.
    """
    if isinstance(cache.model, RNNSeq2Seq):
        raise InputError("value-weighted attention requires a Transformer, got an RNN")
    attention = get_attention(cache.model, stack, layer)
    record = cache.attention_records(stack, layer)[-1]
    values = record.inputs.values[0].repeat_interleave(
        attention.head_config.n_heads // attention.head_config.n_kv_heads, dim=0
    )
    norms = project_head_results(attention, values).norm(dim=-1)
    return cache.weights(stack, layer) * norms[:, None]


def project_head_results(
    attention: Attention, results: Float[Tensor, "head position d_value"]
) -> Float[Tensor, "head position d_model"]:
    """Multiply each head's result by the head's slice of the output projection, without adding the bias."""
    n_heads, d_value = attention.head_config.n_heads, attention.head_config.d_value
    is_split = attention.head_config.combination is HeadCombination.SPLIT
    if not isinstance(attention.out_proj, torch.nn.Linear):
        if not is_split:
            return results / (n_heads if attention.head_config.combination is HeadCombination.POOLED_MEAN else 1)
        outputs = results.new_zeros(n_heads, results.shape[1], n_heads * d_value)
        for head in range(n_heads):
            outputs[head, :, head * d_value : (head + 1) * d_value] = results[head]
        return outputs
    weight = attention.out_proj.weight.T
    if is_split:
        return torch.einsum("hnv,hvd->hnd", results, weight.view(n_heads, d_value, -1))
    projected = results @ weight
    return projected / n_heads if attention.head_config.combination is HeadCombination.POOLED_MEAN else projected


def merge_subwords(view: AttentionMapView, queries: TokenizedText, keys: TokenizedText) -> AttentionMapView:
    """Merge subword tokens into words.

    If a key word has several tokens, their weights are summed. If a query word has several tokens, their rows are
    averaged (arXiv:1906.04341).
    """
    rows, row_labels = _token_to_word_membership(queries)
    columns, column_labels = _token_to_word_membership(keys)
    weights = view.weights @ columns.to(view.weights)
    weights = (rows.to(weights) / rows.sum(0).to(weights)).T @ weights
    return replace(
        view, weights=weights, queries=row_labels, keys=column_labels, title=f"{view.title}, subwords merged"
    )


def refine_map(
    view: AttentionMapView,
    queries: TokenizedText,
    keys: TokenizedText,
    *,
    merge_words: bool = False,
    keep_sink: bool = True,
) -> AttentionMapView:
    """Remove the attention sinks if `keep_sink` is false, and merge subwords into words if `merge_words` is true."""
    if not keep_sink:
        remaining = remove_sink(view.weights, sink_mask(keys))
        view = replace(view, weights=remaining, title=f"{view.title}, without attention sinks", is_share=True)
    return merge_subwords(view, queries, keys) if merge_words else view


def remove_sink(weights: Float[Tensor, "*rows key"], sink: Bool[Tensor, " key"]) -> Float[Tensor, "*rows key"]:
    """Set the weights of the sinks to zero, and renormalize each row. Rows without any other weight become zero."""
    remaining = weights.masked_fill(sink.to(weights.device), 0.0)
    return remaining / remaining.sum(-1, keepdim=True).clamp(min=1e-30)


def sink_mask(tokens: TokenizedText) -> Bool[Tensor, " key"]:
    """Return a mask of the typical attention sinks, which are the first position and all special tokens."""
    return torch.tensor([position == 0 or special for position, special in enumerate(tokens.is_special)])


def _token_to_word_membership(tokens: TokenizedText) -> tuple[Float[Tensor, "token group"], list[str]]:
    """Return a token-to-word membership matrix and the word labels. Each token outside words forms its own group."""
    names: list[str] = []
    group_of: list[int] = []
    previous_word: int | None = None
    for token, word in zip(tokens.tokens, tokens.word_ids, strict=True):
        if word is not None and word == previous_word:
            names[-1] += token.lstrip()
        else:
            names.append(mark_whitespace(token.strip() or token))
        previous_word = word
        group_of.append(len(names) - 1)
    return torch.nn.functional.one_hot(torch.tensor(group_of), len(names)).float(), names


def select_head(weights: Float[Tensor, "head query key"], head: int | None) -> AttentionMatrix:
    """Return one head's weights, or the mean over heads if `head` is `None`."""
    return weights.mean(0) if head is None else weights[check_index("head", head, len(weights), unit="heads")]


def _attention_map_title(stack: AttentionStack, layer: int | None, head: int | None) -> str:
    names = {
        AttentionStack.SELF: "self-attention",
        AttentionStack.ENCODER: "encoder self-attention",
        AttentionStack.DECODER: "decoder self-attention",
        AttentionStack.CROSS: "cross-attention",
    }
    if layer is None and head is None:
        return f"{names[stack]}, mean of all layers and heads"
    layer_text = "mean of all layers" if layer is None else f"layer {layer}"
    head_text = "mean of all heads" if head is None else f"head {head}"
    return f"{names[stack]}, {layer_text}, {head_text}"
