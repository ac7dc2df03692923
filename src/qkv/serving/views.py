"""Every view of a run as data for the wire; the numbers are `qkv.inspection`'s."""

from dataclasses import fields
from math import ceil
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionKind, HeadPattern
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
)  # fmt: skip
from qkv.inspection.attention_map import refine_map, select_head
from qkv.inspection.heads import best_pattern, pattern_targets
from qkv.inspection.validation import check_index
from qkv.models import RNNSeq2Seq
from qkv.serving import schemas
from qkv.serving.frame_codec import Shares
from qkv.serving.run_cache import Run

MOST_CELLS = 512
"""Rows or columns that are sent one by one; longer texts are pooled."""
THUMB = 40
Weights = Float[Tensor, "head query key"]


def fields_of(view: Any) -> dict[str, Any]:  # noqa: ANN401 - any view
    """A dataclass's fields by name, tensors as they are."""
    return {field.name: getattr(view, field.name) for field in fields(view)}


def pooled(weights: Float[Tensor, "*some query key"], most: int) -> tuple[Tensor, int]:
    """The greatest of each p × p cells, with the least p that leaves at most so many rows and columns."""
    p = ceil(max(weights.shape[-2:]) / most)
    if p == 1:
        return weights, 1
    flat = weights.reshape(-1, 1, *weights.shape[-2:]).float()
    smaller = F.max_pool2d(flat, p, ceil_mode=True)
    return smaller.view(*weights.shape[:-2], *smaller.shape[-2:]), p


def stack_of(seen: ActivationCache, stack: AttentionKind | None) -> AttentionKind:
    if not seen.stacks:
        raise InputError("this model has no attention to look at")
    if stack is not None:
        seen.n_layers(stack)  # refuses a stack that the model has not
    return stack or seen.stacks[0]


def heads_view(run: Run, asked: schemas.OfStack) -> dict[str, Any]:
    """As `inspection.heads`, layer by layer: the weights of all layers at once may be more than fits in memory."""
    seen, stack = run.seen, stack_of(run.seen, asked.stack)
    visible = seen.visible_mask(stack)
    places = pattern_targets(seen.select_tokens(stack, is_key=True), visible, is_cross=stack is AttentionKind.CROSS)
    nowhere = torch.zeros_like(visible)
    looks = torch.stack([places.get(one, nowhere) for one in PATTERNS])
    asked_of = looks.any(-1)
    asked_of[_EVEN] = visible.sum(-1) > 1
    n_queries = asked_of.sum(-1)
    n, m = visible.shape
    away = (torch.arange(n)[:, None] - torch.arange(m)).abs() * (stack is not AttentionKind.CROSS) / n
    # Every score but the even one's, and the distance, is a sum of weights: one product gives them all.
    means = torch.cat((looks / n_queries.clamp(min=1)[:, None, None], away[None].to(looks.device))).flatten(1).T
    even = torch.where(asked_of[_EVEN], 1 / visible.sum(-1).clamp(min=2).log(), 0.0) / n_queries[_EVEN].clamp(min=1)
    scores, entropy, distance, thumbs = [], [], [], []
    for layer in range(seen.n_layers(stack)):
        weights = seen.weights(stack, layer)
        sums = weights.flatten(1) @ means.to(weights)
        of_rows = torch.special.entr(weights).sum(-1)
        sums[:, _EVEN] = of_rows @ even.to(weights)
        scores.append(sums[:, :-1].clamp(0, 1))
        distance.append(sums[:, -1])
        entropy.append(of_rows.mean(-1))
        thumbs.append(pooled(weights, THUMB)[0])
    counts = n_queries.tolist()
    return {
        "stack": stack, "patterns": PATTERNS, "scores": torch.stack(scores), "n_queries": counts,
        "labels": [[best_pattern(row, counts) for row in layer] for layer in scores],
        "entropy": torch.stack(entropy), "distance": torch.stack(distance), "error": run.error,
        "thumbs": Shares(torch.stack(thumbs)),
    }  # fmt: skip


_EVEN = PATTERNS.index(HeadPattern.BAG)


def attention(run: Run, asked: schemas.OfLayer) -> dict[str, Any]:
    stack = stack_of(run.seen, asked.stack)
    weights, p = pooled(run.seen.weights(stack, asked.layer), MOST_CELLS)
    return {"stack": stack, "layer": asked.layer, "pool": p, "weights": Shares(weights)}


def tile(run: Run, asked: schemas.AskTile) -> dict[str, Any]:
    (top, bottom), (left, right) = asked.rows, asked.columns
    rows = rows_of(run, stack_of(run.seen, asked.stack), asked.layer, list(range(top, min(bottom, top + MOST_CELLS))))
    head = check_index("head", asked.head, len(rows), of="heads")
    if not (top < bottom <= top + MOST_CELLS and left < right <= min(left + MOST_CELLS, rows.shape[-1])):
        raise InputError(f"rows {top}–{bottom} and columns {left}–{right} are no tile of 1 to {MOST_CELLS} each")
    return {"weights": Shares(rows[head, :, left:right])}


def row(run: Run, asked: schemas.AskRow) -> dict[str, Any]:
    return {"weights": rows_of(run, stack_of(run.seen, asked.stack), asked.layer, [asked.query])[:, 0]}


def rows_of(run: Run, stack: AttentionKind, layer: int, queries: list[int]) -> Weights:
    """Some rows of a layer alone: a hover must not wait for all of them."""
    seen = run.seen
    n = len(seen.query_labels(stack))
    for one in queries:
        check_index("query", one, n, of="positions")
    if isinstance(seen.model, RNNSeq2Seq):
        return seen.weights(stack, layer)[:, queries]
    (look,) = seen.attention_records(stack, layer)
    return look.weights(queries)[0]


def map_view(run: Run, asked: schemas.MapSettings) -> dict[str, Any]:
    view = table(run, asked)
    weights, p = pooled(view.weights, MOST_CELLS)
    return {**fields_of(view), "weights": weights, "pool": p, "queries": view.queries[::p], "keys": view.keys[::p]}


def table(run: Run, asked: schemas.MapSettings) -> AttentionMapView:
    seen, stack = run.seen, stack_of(run.seen, asked.stack)
    queries, keys = seen.select_tokens(stack), seen.select_tokens(stack, is_key=True)
    return refine_map(_table(seen, stack, asked), queries, keys, words=asked.words, sink=asked.sink)


def _table(seen: ActivationCache, stack: AttentionKind, asked: schemas.MapSettings) -> AttentionMapView:
    if asked.of == "weights":
        return attention_map(seen, stack, layer=asked.layer, head=asked.head)
    labels = {"queries": seen.query_labels(stack), "keys": seen.key_labels(stack)}
    if asked.of == "rollout":
        if asked.head is not None:
            raise InputError(f"rollout is of all heads together; head={asked.head} was asked for")
        through = attention_rollout(seen, stack)
        parts = through.source if stack is AttentionKind.CROSS else through.sequence
        assert parts is not None
        layer = len(parts) - 1 if asked.layer is None else check_index("layer", asked.layer, len(parts), of="layers")
        # A decoder's rows are shared between its own tokens and the source's.
        is_share = stack in (AttentionKind.SELF, AttentionKind.ENCODER)
        return AttentionMapView(weights=parts[layer], title=f"{stack}: rollout after layer {layer}", is_share=is_share, **labels)
    if asked.layer is None:
        raise InputError("value-weighted attention is of one layer; none was given")
    norms = value_weighted_attention(seen, stack, layer=asked.layer)
    of_head = "mean of all heads" if asked.head is None else f"head {asked.head}"
    return AttentionMapView(
        weights=select_head(norms, asked.head),
        title=f"{stack}: ‖a·v·W_O‖, layer {asked.layer}, {of_head}", is_share=False, **labels,
    )  # fmt: skip


def neuron_view(run: Run, asked: schemas.AskNeuron) -> dict[str, Any]:
    view = compute_neuron_view(run.seen, stack_of(run.seen, asked.stack), layer=asked.layer, head=asked.head, query=asked.query)
    return fields_of(view)


def residual(run: Run, asked: schemas.OfStack) -> dict[str, Any]:
    if isinstance(run.seen.model, RNNSeq2Seq):
        raise InputError("an RNN has no residual stream")
    return fields_of(residual_stream_norms(run.seen, stack_of(run.seen, asked.stack)))


def write(run: Run, asked: schemas.AskRow) -> dict[str, Any]:
    seen, stack = run.seen, stack_of(run.seen, asked.stack)
    if isinstance(seen.model, RNNSeq2Seq):
        raise InputError("an RNN has no residual stream that heads write into")
    moved = value_weighted_attention(seen, stack, layer=asked.layer)
    query = check_index("query", asked.query, moved.shape[1], of="positions")
    written = head_outputs(seen, stack, asked.layer)[:, query].norm(dim=-1)
    return {"heads": written, "moved": moved[:, query], "keys": seen.key_labels(stack)}


def lens_view(run: Run, asked: schemas.AskGuesses) -> dict[str, Any]:
    if run.seen.logits is None:
        raise InputError("this BERT has no masked-word head, so it makes no guesses")
    view = logit_lens(run.seen, run.task.tokenizer, n=asked.n)
    found = fields_of(view)
    rows = zip(view.ids.flatten(0, 1).tolist(), (cell for row in view.tokens for cell in row), strict=True)
    names = {number: token for ids, tokens in rows for number, token in zip(ids, tokens, strict=True)}
    return {**found, "tokens": None, "names": names}


def contributions_view(run: Run, asked: schemas.AskContributions) -> dict[str, Any]:
    found = logit_attribution(
        run.seen, run.task.tokenizer, position=asked.position, token_id=asked.token_id, against=asked.against
    )
    return fields_of(found)


def embeddings_view(run: Run, asked: schemas.AskGuesses) -> dict[str, Any]:
    if len(run.reading.sequence.ids) < 2 and isinstance(run.seen.model, RNNSeq2Seq):
        raise InputError("a map needs at least 2 tokens, the text has 1")
    return fields_of(embedding_trajectories(run.seen, run.task.tokenizer, n=asked.n))


def compare(left: Run, right: Run, asked: schemas.AskCompare) -> dict[str, Any]:
    """Both maps, and left − right where that has a meaning."""
    one, other = (map_view(run, asked) for run in (left, right))
    shapes = [tuple(each["weights"].shape) for each in (one, other)]
    why = ""
    if shapes[0] != shapes[1]:
        why = f"the left map is {shapes[0][0]} × {shapes[0][1]}, the right one {shapes[1][0]} × {shapes[1][1]}"
    difference = None if why else one["weights"] - other["weights"]
    return {"left": one, "right": other, "difference": difference, "why": why}
