"""Identify the attention pattern of each head."""

import unicodedata
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.choices import AttentionStack, HeadPattern
from qkv.inspection.activation_cache import ActivationCache, LayerHeadWeights
from qkv.inspection.model_input import TokenizedText
from qkv.inspection.short_repr import ShortRepr

PATTERNS = tuple(HeadPattern)
MIN_SCORE = 0.4
"""The minimum score for a head to be named after a pattern.

This is more than the weight of any single key in a head with uniform attention and three visible keys.
"""
MIN_QUERIES = 3
"""The minimum number of queries over which a score must be averaged. One or two queries do not show a pattern."""
MIN_UNIFORMITY = 0.95
"""The minimum score for bag-of-words, which is higher because almost every head has a high normalized entropy."""

QueryKeyMask = Bool[Tensor, "query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadsView(ShortRepr):
    """The attention weights and pattern scores of each head."""

    stack: AttentionStack
    weights: LayerHeadWeights
    scores: Float[Tensor, "layer head pattern"]
    """The score of each head for each pattern, in the order of `PATTERNS`."""
    n_queries: list[int]
    """The number of queries over which each pattern's score is averaged.

    If this number is 0, the text cannot show the pattern, and the score is 0.
    """
    uniform_scores: list[float]
    """The scores of a hypothetical head with uniform attention, in the order of `PATTERNS`."""
    labels: list[list[HeadPattern | None]]
    """The pattern after which each head in each layer is named, or `None`."""
    entropy: Float[Tensor, "layer head"]
    """The entropy of each head's attention weights in nats, averaged over queries."""
    distance: Float[Tensor, "layer head"]
    """The mean distance between a query and the keys that it attends to, in tokens.

    The distance is 0 for cross-attention, where it has no meaning.
    """
    queries: list[str]
    keys: list[str]
    error: float
    """The value of max|A·V − output| for the forward pass."""


def classify_heads(cache: ActivationCache, stack: AttentionStack | None = None) -> HeadsView:
    """Score every head on every pattern, and identify each head's pattern.

    `stack` defaults to the model's first attention stack.
    """
    stack = stack or cache.stacks[0]
    weights, visible = cache.all_weights(stack), cache.visible_mask(stack)
    targets = pattern_target_masks(
        cache.attention_axis_tokens(stack, is_key=True), visible, is_cross=stack is AttentionStack.CROSS
    )
    scores = torch.stack([score_pattern(weights, visible, pattern, targets) for pattern in PATTERNS], dim=-1)
    n_queries = [int(_queries_with_targets(visible, pattern, targets).sum()) for pattern in PATTERNS]
    uniform = (visible / visible.sum(-1, keepdim=True).clamp(min=1)).to(weights)[None, None]
    n, m = visible.shape
    distances = (torch.arange(n)[:, None] - torch.arange(m)).abs().to(weights)
    return HeadsView(
        stack=stack,
        weights=weights,
        scores=scores,
        n_queries=n_queries,
        uniform_scores=[float(score_pattern(uniform, visible, pattern, targets)[0, 0]) for pattern in PATTERNS],
        labels=[[best_pattern(row, n_queries) for row in layer] for layer in scores],
        entropy=_attention_entropy(weights).mean(-1),
        distance=(weights * distances).sum(-1).mean(-1) * (stack is not AttentionStack.CROSS),
        queries=cache.query_labels(stack),
        keys=cache.key_labels(stack),
        error=cache.attention_reconstruction_error,
    )


def pattern_target_masks(
    keys: TokenizedText, visible: QueryKeyMask, *, is_cross: bool
) -> dict[HeadPattern, QueryKeyMask]:
    """Return a mask of the query–key pairs that define each pattern except bag-of-words.

    previous-token: i → i−1. first-token: i → 0, with i > 0 in self-attention. delimiter: i → another token that is
    special or punctuation, except position 0. duplicate: i → j ≠ i with the same token. induction: i → j+1 ≠ i, where
    token j ≠ i equals token i, so that j+1 is the token that followed token i elsewhere. For cross-attention, only the
    patterns that depend only on the keys exist.
    """
    n, m = visible.shape
    first = torch.zeros(n, m, dtype=torch.bool)
    first[(0 if is_cross else 1) :, 0] = True
    delimiter = torch.tensor(
        [is_delimiter(token, special=special) for token, special in zip(keys.tokens, keys.is_special, strict=True)]
    )
    delimiter[0] = False
    is_same_token = torch.zeros(n, m, dtype=torch.bool) if is_cross else torch.eye(n, dtype=torch.bool)
    targets = {HeadPattern.FIRST: first, HeadPattern.DELIMITER: delimiter & ~is_same_token}
    if not is_cross:
        targets |= _self_attention_targets(torch.tensor(keys.ids))
    return {pattern: mask.to(visible.device) & visible for pattern, mask in targets.items()}


def _self_attention_targets(ids: Int[Tensor, " position"]) -> dict[HeadPattern, QueryKeyMask]:
    n = len(ids)
    diagonal = torch.eye(n, dtype=torch.bool)
    previous = torch.zeros(n, n, dtype=torch.bool)
    previous[1:, :-1] = torch.eye(n - 1, dtype=torch.bool)
    duplicate = (ids[:, None] == ids) & ~diagonal
    induction = torch.zeros(n, n, dtype=torch.bool)
    induction[:, 1:] = duplicate[:, :-1]
    return {
        HeadPattern.PREVIOUS: previous,
        HeadPattern.DUPLICATE: duplicate,
        HeadPattern.INDUCTION: induction & ~diagonal,
    }


def is_delimiter(token: str, *, special: bool) -> bool:
    text = token.strip()
    return special or (bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text))


def score_pattern(
    weights: LayerHeadWeights, visible: QueryKeyMask, pattern: HeadPattern, targets: dict[HeadPattern, QueryKeyMask]
) -> Float[Tensor, "layer head"]:
    """Score every head on one pattern, from 0 to 1.

    For bag-of-words, the score is the entropy of each row divided by its maximum, log(visible keys), averaged over the
    queries with at least two visible keys. For all other patterns, the score is the weight on the pattern's keys,
    averaged over the queries that have such keys.
    """
    has_target = _queries_with_targets(visible, pattern, targets)
    if not bool(has_target.any()):
        return weights.new_zeros(weights.shape[:2])
    if pattern is HeadPattern.BAG:
        return (
            (_attention_entropy(weights)[..., has_target] / visible.sum(-1)[has_target].to(weights).log())
            .mean(-1)
            .clamp(0, 1)
        )
    return (weights * targets[pattern]).sum(-1)[..., has_target].mean(-1).clamp(0, 1)


def best_pattern(scores: Float[Tensor, " pattern"], n_queries: list[int]) -> HeadPattern | None:
    """Return the pattern after which a head is named, or `None`.

    This is the pattern with the highest score, which must be at least 0.4. If there is no such pattern, it is
    bag-of-words if that score is at least 0.95.
    """
    bag_index = PATTERNS.index(HeadPattern.BAG)
    has_enough = torch.tensor([n >= MIN_QUERIES for n in n_queries], device=scores.device)
    candidates = scores.where(has_enough, -1.0)
    candidates[bag_index] = -1.0
    best = int(candidates.argmax())
    if candidates[best] >= MIN_SCORE:
        return PATTERNS[best]
    return HeadPattern.BAG if scores[bag_index] >= MIN_UNIFORMITY else None


def _queries_with_targets(
    visible: QueryKeyMask, pattern: HeadPattern, targets: dict[HeadPattern, QueryKeyMask]
) -> Bool[Tensor, " query"]:
    if pattern is HeadPattern.BAG:
        return visible.sum(-1) > 1
    return targets[pattern].any(-1) if pattern in targets else torch.zeros_like(visible[:, 0])


def _attention_entropy(weights: LayerHeadWeights) -> Float[Tensor, "layer head query"]:
    return torch.special.entr(weights).sum(-1)
