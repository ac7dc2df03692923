"""Analyze token vectors across layers: 2-D projections, similarity to the embedding, and nearest tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionStack
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache
from qkv.inspection.logit_lens import depth_names, residual_tap_names
from qkv.inspection.model_input import mark_whitespace
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.inspection.word_map import pca_2d_with_explained_variance
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.nn.positions import LearnedPositions, SinusoidalPositions
from qkv.text import Tokenizer
from qkv.text.token_display import token_text_or_vocabulary_name


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingView(ShortRepr):
    """Token vectors at every depth, projected with the same PCA so that their paths can be followed."""

    tokens: list[str]
    depths: list[str]
    points: Float[Tensor, "depth token 2"]
    """The coordinates of the normalized vectors along the first two principal components.

    The vectors are normalized because the norm of the residual stream grows from layer to layer.
    """
    explained_variance: list[float]
    """The explained variance ratio of each component."""
    similarity: Float[Tensor, "depth token"]
    """The cosine similarity of each vector to the same token's vector at the first depth."""
    neighbors: list[list[tuple[str, float]]]
    """The nearest neighbors of each token in the embedding matrix, with their cosine similarities."""


def embedding_trajectories(cache: ActivationCache, tokenizer: Tokenizer, *, n: int = 5) -> EmbeddingView:
    """Compute the projected path of each token or, for an encoder–decoder, of each target token."""
    model, sequence = cache.model, cache.model_input.sequence
    if isinstance(model, RNNSeq2Seq):
        names, depths = ["decoder.states"], ["decoder's states"]
    else:
        names = residual_tap_names(model, AttentionStack.DECODER if isinstance(model, Seq2Seq) else AttentionStack.SELF)
        depths = depth_names(len(names))
    vectors = torch.stack([F.normalize(cache.get_activation(name).float(), dim=-1) for name in names]).cpu()
    points, explained_variance = pca_2d_with_explained_variance(vectors.flatten(0, 1))
    return EmbeddingView(
        tokens=sequence.labels,
        depths=depths,
        points=points.view(len(names), len(sequence.ids), 2),
        explained_variance=explained_variance,
        similarity=(vectors * vectors[0]).sum(-1),
        neighbors=_nearest_tokens_of_ids(model, tokenizer, sequence.ids, n=n),
    )


@torch.no_grad()
def nearest_tokens(model: Model, tokenizer: Tokenizer, token_id: int, *, n: int = 5) -> list[tuple[str, float]]:
    """Return the tokens whose embeddings have the largest cosine similarities to a token's embedding, best first."""
    return _nearest_tokens_of_ids(model, tokenizer, [token_id], n=n)[0]


@torch.no_grad()
def _nearest_tokens_of_ids(
    model: Model, tokenizer: Tokenizer, token_ids: list[int], *, n: int
) -> list[list[tuple[str, float]]]:
    """Return the nearest tokens for each id. The embedding matrix is normalized only once for all ids."""
    rows = F.normalize(_token_embeddings(model)[: tokenizer.vocab_size].float(), dim=-1)
    neighbors: dict[int, list[tuple[str, float]]] = {}
    for token_id in token_ids:
        if check_index("id", token_id, len(rows), unit="vocabulary ids") in neighbors:
            continue
        similarities = rows @ rows[token_id]
        similarities[token_id] = -2.0
        best = similarities.topk(min(n, len(rows) - 1))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        neighbors[token_id] = [(mark_whitespace(token_text_or_vocabulary_name(tokenizer, i)), p) for i, p in pairs]
    return [neighbors[token_id] for token_id in token_ids]


@torch.no_grad()
def position_similarity(model: Model, n: int) -> Float[Tensor, "position position"]:
    """Return the cosine similarities between the position embeddings."""
    embedding = (
        None if isinstance(model, RNNSeq2Seq) else (model.decoder if isinstance(model, Seq2Seq) else model).embedding
    )
    position = None if embedding is None else embedding.position
    if not isinstance(position, LearnedPositions | SinusoidalPositions):
        raise InputError("the model must add learned or sinusoidal position embeddings to its token embeddings")
    if n > model.config.context_length:
        raise InputError(f"n must be at most the model's context_length={model.config.context_length}, got {n}")
    zeros = torch.zeros(1, n, model.config.d_model, device=next(model.parameters()).device)
    rows = F.normalize(position(zeros, torch.arange(n, device=zeros.device)[None])[0], dim=-1)
    return rows @ rows.T


def _token_embeddings(model: Model) -> Float[Tensor, "token d_model"]:
    match model:
        case Seq2Seq():
            return model.decoder.embedding.token.weight
        case RNNSeq2Seq():
            return model.embedding.weight
        case _:
            return model.embedding.token.weight
