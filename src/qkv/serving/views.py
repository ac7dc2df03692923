"""Build the views of a run as data that can be encoded as frames. `qkv.inspection` computes the numbers."""

from dataclasses import fields
from math import ceil
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionStack, HeadPattern
from qkv.errors import InputError
from qkv.inspection import (
    PATTERNS,
    ActivationCache,
    AttentionMapView,
    attention_map,
    attention_rollout,
    compute_neuron_view,
    embedding_trajectories,
    head_outputs,
    logit_attribution,
    logit_lens,
    residual_stream_norms,
    value_weighted_attention,
)
from qkv.inspection.attention_map import refine_map, select_head
from qkv.inspection.heads import best_pattern, pattern_target_masks
from qkv.inspection.validation import check_index
from qkv.models import RNNSeq2Seq
from qkv.serving import schemas
from qkv.serving.frame_codec import WeightsToQuantize
from qkv.serving.run_cache import Run

MAX_CELLS = 512
"""Maximum number of rows or columns of a map that is sent in full. Larger maps are max-pooled."""
THUMBNAIL_CELLS = 40
HeadWeights = Float[Tensor, "head query key"]


def view_to_dict(view: Any) -> dict[str, Any]:  # noqa: ANN401 - any view of qkv.inspection
    """Return the fields of a dataclass, keyed by name. Tensors are not converted."""
    return {field.name: getattr(view, field.name) for field in fields(view)}


def max_pool_map(weights: Float[Tensor, "*batch query key"], max_cells: int) -> tuple[Tensor, int]:
    """Max-pool maps over p × p cells so that at most `max_cells` rows and columns are left, and also return p."""
    p = ceil(max(weights.shape[-2:]) / max_cells)
    if p == 1:
        return weights, 1
    flat = weights.reshape(-1, 1, *weights.shape[-2:]).float()
    smaller = F.max_pool2d(flat, p, ceil_mode=True)
    return smaller.view(*weights.shape[:-2], *smaller.shape[-2:]), p


def resolve_stack(cache: ActivationCache, stack: AttentionStack | None) -> AttentionStack:
    """Return the requested attention stack, or the model's first stack if none is requested.

    Raise an error if the model does not have the stack.
    """
    if not cache.stacks:
        raise InputError("this model has no attention")
    if stack is not None:
        cache.n_layers(stack)  # raises an error if the model does not have this stack
    return stack or cache.stacks[0]


def head_pattern_scores_view(run: Run, request: schemas.StackRequest) -> dict[str, Any]:
    """Compute the scores of `inspection.classify_heads` layer by layer to save memory."""
    cache, stack = run.cache, resolve_stack(run.cache, request.stack)
    visible = cache.visible_mask(stack)
    targets = pattern_target_masks(
        cache.attention_axis_tokens(stack, is_key=True), visible, is_cross=stack is AttentionStack.CROSS
    )
    no_targets = torch.zeros_like(visible)
    target_masks = torch.stack([targets.get(pattern, no_targets) for pattern in PATTERNS])
    is_counted = target_masks.any(-1)
    is_counted[_BAG_OF_WORDS] = visible.sum(-1) > 1
    n_queries = is_counted.sum(-1)
    n, m = visible.shape
    distances = (torch.arange(n)[:, None] - torch.arange(m)).abs() * (stack is not AttentionStack.CROSS) / n
    # All scores except bag-of-words, and the mean distance, are weighted sums of the attention weights, so a single
    # matrix product computes all of them.
    coefficients = target_masks / n_queries.clamp(min=1)[:, None, None]
    coefficients = torch.cat((coefficients, distances[None].to(coefficients.device))).flatten(1).T
    # The bag-of-words score is the entropy of a row relative to that of uniform attention.
    entropy_scale = torch.where(is_counted[_BAG_OF_WORDS], 1 / visible.sum(-1).clamp(min=2).log(), 0.0)
    entropy_scale = entropy_scale / n_queries[_BAG_OF_WORDS].clamp(min=1)
    scores, entropy, distance, thumbnails = [], [], [], []
    for layer in range(cache.n_layers(stack)):
        weights = cache.weights(stack, layer)
        sums = weights.flatten(1) @ coefficients.to(weights)
        row_entropy = torch.special.entr(weights).sum(-1)
        sums[:, _BAG_OF_WORDS] = row_entropy @ entropy_scale.to(weights)
        scores.append(sums[:, :-1].clamp(0, 1))
        distance.append(sums[:, -1])
        entropy.append(row_entropy.mean(-1))
        thumbnails.append(max_pool_map(weights, THUMBNAIL_CELLS)[0])
    counts = n_queries.tolist()
    return {
        "stack": stack,
        "patterns": PATTERNS,
        "scores": torch.stack(scores),
        "n_queries": counts,
        "labels": [[best_pattern(row, counts) for row in layer] for layer in scores],
        "entropy": torch.stack(entropy),
        "distance": torch.stack(distance),
        "error": run.error,
        "thumbnails": WeightsToQuantize(torch.stack(thumbnails)),
    }


_BAG_OF_WORDS = PATTERNS.index(HeadPattern.BAG)


def layer_attention_view(run: Run, request: schemas.LayerRequest) -> dict[str, Any]:
    stack = resolve_stack(run.cache, request.stack)
    weights, p = max_pool_map(run.cache.weights(stack, request.layer), MAX_CELLS)
    return {"stack": stack, "layer": request.layer, "pool_size": p, "weights": WeightsToQuantize(weights)}


def attention_tile_view(run: Run, request: schemas.AttentionTileRequest) -> dict[str, Any]:
    (top, bottom), (left, right) = request.rows, request.columns
    queries = list(range(top, min(bottom, top + MAX_CELLS)))
    rows = attention_rows(run, resolve_stack(run.cache, request.stack), request.layer, queries)
    head = check_index("head", request.head, len(rows), unit="heads")
    if not (top < bottom <= top + MAX_CELLS and left < right <= min(left + MAX_CELLS, rows.shape[-1])):
        raise InputError(
            f"a tile must have 1 to {MAX_CELLS} rows and columns within the map, got rows {top}–{bottom} and columns "
            f"{left}–{right}"
        )
    return {"weights": WeightsToQuantize(rows[head, :, left:right])}


def row_view(run: Run, request: schemas.RowRequest) -> dict[str, Any]:
    stack = resolve_stack(run.cache, request.stack)
    return {"weights": attention_rows(run, stack, request.layer, [request.query])[:, 0]}


def attention_rows(run: Run, stack: AttentionStack, layer: int, queries: list[int]) -> HeadWeights:
    """Return the attention weights of the requested queries.

    The other queries' weights are not computed, which makes hovering fast.
    """
    cache = run.cache
    n = len(cache.query_labels(stack))
    for query in queries:
        check_index("query", query, n, unit="positions")
    if isinstance(cache.model, RNNSeq2Seq):
        return cache.weights(stack, layer)[:, queries]
    (record,) = cache.attention_records(stack, layer)
    return record.weights(queries)[0]


def max_pooled_map_view(run: Run, request: schemas.MapOptions) -> dict[str, Any]:
    view = build_attention_map(run, request)
    weights, p = max_pool_map(view.weights, MAX_CELLS)
    return {
        **view_to_dict(view),
        "weights": weights,
        "pool_size": p,
        "queries": view.queries[::p],
        "keys": view.keys[::p],
    }


def build_attention_map(run: Run, options: schemas.MapOptions) -> AttentionMapView:
    """Compute the requested attention map, optionally merging words and removing sinks."""
    cache, stack = run.cache, resolve_stack(run.cache, options.stack)
    queries, keys = cache.attention_axis_tokens(stack), cache.attention_axis_tokens(stack, is_key=True)
    view = _compute_attention_map(cache, stack, options)
    return refine_map(view, queries, keys, merge_words=options.merge_words, keep_sink=options.keep_sink)


def _compute_attention_map(
    cache: ActivationCache, stack: AttentionStack, options: schemas.MapOptions
) -> AttentionMapView:
    if options.kind == "weights":
        return attention_map(cache, stack, layer=options.layer, head=options.head)
    labels = {"queries": cache.query_labels(stack), "keys": cache.key_labels(stack)}
    if options.kind == "rollout":
        if options.head is not None:
            raise InputError(f"head must be None for rollout, which averages over all heads, got head={options.head}")
        rollout = attention_rollout(cache, stack)
        layers = rollout.source if stack is AttentionStack.CROSS else rollout.sequence
        assert layers is not None
        layer = len(layers) - 1
        if options.layer is not None:
            layer = check_index("layer", options.layer, len(layers), unit="layers")
        # In a decoder, each row is divided between target tokens and source tokens, so the parts do not sum to 1.
        is_share = stack in (AttentionStack.SELF, AttentionStack.ENCODER)
        title = f"{stack}: rollout after layer {layer}"
        return AttentionMapView(weights=layers[layer], title=title, is_share=is_share, **labels)
    if options.layer is None:
        raise InputError("value-weighted attention requires a layer, got layer=None")
    norms = value_weighted_attention(cache, stack, layer=options.layer)
    head = "mean of all heads" if options.head is None else f"head {options.head}"
    return AttentionMapView(
        weights=select_head(norms, options.head),
        title=f"{stack}: ‖a·v·W_O‖, layer {options.layer}, {head}",
        is_share=False,
        **labels,
    )


def neuron_view(run: Run, request: schemas.NeuronViewRequest) -> dict[str, Any]:
    stack = resolve_stack(run.cache, request.stack)
    view = compute_neuron_view(run.cache, stack, layer=request.layer, head=request.head, query=request.query)
    return view_to_dict(view)


def residual_view(run: Run, request: schemas.StackRequest) -> dict[str, Any]:
    if isinstance(run.cache.model, RNNSeq2Seq):
        raise InputError("an RNN has no residual stream")
    return view_to_dict(residual_stream_norms(run.cache, resolve_stack(run.cache, request.stack)))


def head_norms_and_value_weighted_view(run: Run, request: schemas.RowRequest) -> dict[str, Any]:
    """Return the norm of each head's output at a query and the value-weighted attention to each key."""
    cache, stack = run.cache, resolve_stack(run.cache, request.stack)
    if isinstance(cache.model, RNNSeq2Seq):
        raise InputError("an RNN has no residual stream that heads write to")
    value_weighted = value_weighted_attention(cache, stack, layer=request.layer)
    query = check_index("query", request.query, value_weighted.shape[1], unit="positions")
    head_norms = head_outputs(cache, stack, request.layer)[:, query].norm(dim=-1)
    return {"head_norms": head_norms, "value_weighted": value_weighted[:, query], "keys": cache.key_labels(stack)}


def logit_lens_view(run: Run, request: schemas.TopTokensRequest) -> dict[str, Any]:
    if run.cache.logits is None:
        raise InputError("this BERT makes no predictions because it has no masked-language-modeling head")
    view = logit_lens(run.cache, run.task.tokenizer, n=request.n)
    # Labels are sent only once for each token id because the same tokens occur in most cells.
    cells = zip(view.ids.flatten(0, 1).tolist(), (cell for row in view.tokens for cell in row), strict=True)
    labels = {token_id: token for ids, tokens in cells for token_id, token in zip(ids, tokens, strict=True)}
    return {**view_to_dict(view), "tokens": None, "token_labels": labels}


def logit_attribution_view(run: Run, request: schemas.LogitAttributionRequest) -> dict[str, Any]:
    view = logit_attribution(
        run.cache,
        run.task.tokenizer,
        position=request.position,
        token_id=request.token_id,
        against=request.against,
    )
    return view_to_dict(view)


def embeddings_view(run: Run, request: schemas.TopTokensRequest) -> dict[str, Any]:
    if len(run.model_input.sequence.ids) < 2 and isinstance(run.cache.model, RNNSeq2Seq):
        raise InputError("a projection requires at least 2 tokens, got 1")
    return view_to_dict(embedding_trajectories(run.cache, run.task.tokenizer, n=request.n))


def compare_view(left: Run, right: Run, request: schemas.CompareRunsRequest) -> dict[str, Any]:
    """Return the attention maps of two runs and, if the maps have the same shape, their difference."""
    left_map, right_map = (max_pooled_map_view(run, request) for run in (left, right))
    left_shape, right_shape = (tuple(view["weights"].shape) for view in (left_map, right_map))
    reason, difference = "", None
    if left_shape == right_shape:
        difference = left_map["weights"] - right_map["weights"]
    else:
        reason = (
            f"the left map is {left_shape[0]} × {left_shape[1]}, the right map is {right_shape[0]} × {right_shape[1]}"
        )
    return {"left": left_map, "right": right_map, "difference": difference, "reason": reason}
