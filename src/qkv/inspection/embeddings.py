"""Tokens as points: where they lie, how they move through the layers, who lies near."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Stack
from qkv.errors import InputError
from qkv.inspection.brief import Brief
from qkv.inspection.lens import depth_names, stream_names
from qkv.inspection.places import inside
from qkv.inspection.reading import label
from qkv.inspection.seeing import Seen
from qkv.inspection.word_map import flatten
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import LearnedPositions, SinusoidalPositions
from qkv.text import Tokenizer
from qkv.text.showing import text_of


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingView(Brief):
    """View H: one map for all depths, so that a token's path can be followed."""

    tokens: list[str]
    depths: list[str]
    points: Float[Tensor, "depth token 2"]
    """Vectors of length 1 (the stream grows from layer to layer), along the two directions of greatest spread."""
    spread: list[float]
    """The share of the spread that each direction holds."""
    likeness: Float[Tensor, "depth token"]
    """Cosine with the token's own vector at the first depth."""
    neighbours: list[list[tuple[str, float]]]
    """Of each token, those nearest in the token table, by cosine."""


def embeddings(seen: Seen, tokenizer: Tokenizer, *, n: int = 5) -> EmbeddingView:
    """Of an encoder–decoder the target's tokens."""
    model, own = seen.model, seen.reading.own
    if isinstance(model, RNNSeq2Seq):
        names, depths = ["decoder.states"], ["decoder's states"]
    else:
        names = stream_names(model, Stack.DECODER if isinstance(model, Seq2Seq) else Stack.SELF)
        depths = depth_names(len(names))
    vectors = torch.stack([F.normalize(seen.stream(name).float(), dim=-1) for name in names]).cpu()
    points, spread = flatten(vectors.flatten(0, 1))
    return EmbeddingView(
        tokens=own.labels, depths=depths, points=points.view(len(names), len(own.ids), 2), spread=spread,
        likeness=(vectors * vectors[0]).sum(-1),
        neighbours=_nearest(model, tokenizer, own.ids, n=n),
    )  # fmt: skip


@torch.no_grad()
def neighbours(model: Model, tokenizer: Tokenizer, number: int, *, n: int = 5) -> list[tuple[str, float]]:
    """The tokens whose vectors in the token table have the greatest cosine with this one's, best first."""
    return _nearest(model, tokenizer, [number], n=n)[0]


@torch.no_grad()
def _nearest(model: Model, tokenizer: Tokenizer, numbers: list[int], *, n: int) -> list[list[tuple[str, float]]]:
    """Of each id; the table is brought to length 1 once for all of them."""
    rows = F.normalize(_table(model)[: tokenizer.vocab_size].float(), dim=-1)
    found: dict[int, list[tuple[str, float]]] = {}
    for number in numbers:
        if inside("id", number, len(rows), of="ids of the vocabulary") in found:
            continue
        likeness = rows @ rows[number]
        likeness[number] = -2.0
        best = likeness.topk(min(n, len(rows) - 1))
        both = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found[number] = [(label(text_of(tokenizer, i)), p) for i, p in both]
    return [found[number] for number in numbers]


@torch.no_grad()
def position_likeness(model: Model, n: int) -> Float[Tensor, "position position"]:
    """Cosine between the vectors of positions, where a model has such."""
    embedding = (
        None if isinstance(model, RNNSeq2Seq) else (model.decoder if isinstance(model, Seq2Seq) else model).embedding
    )
    position = None if embedding is None else embedding.position
    if not isinstance(position, LearnedPositions | SinusoidalPositions):
        raise InputError("this model adds no vectors of positions to its tokens: there is nothing to compare")
    if n > model.config.context_length:
        raise InputError(f"{n} positions were asked for, the model's context_length is {model.config.context_length}")
    empty = torch.zeros(1, n, model.config.d_model, device=next(model.parameters()).device)
    rows = F.normalize(position(empty, torch.arange(n, device=empty.device)[None])[0], dim=-1)
    return rows @ rows.T


def _table(model: Model) -> Float[Tensor, "token d_model"]:
    match model:
        case Seq2Seq():
            return model.decoder.embedding.token.weight
        case RNNSeq2Seq():
            return model.embedding.weight
        case _:
            return model.embedding.token.weight
