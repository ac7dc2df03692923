"""What does each head look at? Patterns that are recognised, each with a score from 0 to 1."""

import unicodedata
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.choices import HeadPattern, AttentionKind
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.model_input import TokenizedText
from qkv.inspection.activation_cache import LayerHeadWeights, ActivationCache

PATTERNS = tuple(HeadPattern)
MIN_SCORE = 0.4
"""A pattern names a head from here on; an even head gives one place among three less."""
MIN_QUERIES = 3
"""One or two looks are no pattern."""
MIN_UNIFORMITY = 0.95
"""An even spread is measured by entropy, which is high for almost any head."""

QueryKeyMask = Bool[Tensor, "query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadsView(ShortRepr):
    """View A: every head of a stack, with what it looks at."""

    stack: AttentionKind
    weights: LayerHeadWeights
    scores: Float[Tensor, "layer head pattern"]
    """In the order of `PATTERNS`."""
    n_queries: list[int]
    """How many queries each pattern's score is a mean over; 0: this text cannot show it, the score is 0."""
    uniform_scores: list[float]
    """What a head that looks at everything alike would score, in the same order."""
    labels: list[list[HeadPattern | None]]
    """Of each layer and head the pattern that names it, if one does."""
    entropy: Float[Tensor, "layer head"]
    """Nats, mean over queries."""
    distance: Float[Tensor, "layer head"]
    """How many tokens away a head looks, on average; of cross-attention it means nothing and is 0."""
    queries: list[str]
    keys: list[str]
    error: float
    """max|A·V − output| of the pass."""


def classify_heads(seen: ActivationCache, stack: AttentionKind | None = None) -> HeadsView:
    """`stack`: the model's first unless said."""
    stack = stack or seen.stacks[0]
    weights, visible = seen.all_weights(stack), seen.visible_mask(stack)
    places = pattern_targets(seen.select_tokens(stack, is_key=True), visible, is_cross=stack is AttentionKind.CROSS)
    scores = torch.stack([score_pattern(weights, visible, pattern, places) for pattern in PATTERNS], dim=-1)
    n_queries = [int(_queries_with_targets(visible, pattern, places).sum()) for pattern in PATTERNS]
    alike = (visible / visible.sum(-1, keepdim=True).clamp(min=1)).to(weights)[None, None]
    n, m = visible.shape
    away = (torch.arange(n)[:, None] - torch.arange(m)).abs().to(weights)
    return HeadsView(
        stack=stack, weights=weights, scores=scores, n_queries=n_queries,
        uniform_scores=[float(score_pattern(alike, visible, pattern, places)[0, 0]) for pattern in PATTERNS],
        labels=[[best_pattern(row, n_queries) for row in layer] for layer in scores],
        entropy=_attention_entropy(weights).mean(-1),
        distance=(weights * away).sum(-1).mean(-1) * (stack is not AttentionKind.CROSS),
        queries=seen.query_labels(stack), keys=seen.key_labels(stack), error=seen.error,
    )  # fmt: skip


def pattern_targets(keys: TokenizedText, visible: QueryKeyMask, *, is_cross: bool) -> dict[HeadPattern, QueryKeyMask]:
    """The looks that each pattern but bag-of-words means; of cross-attention, those of a source alone.

    previous-token: i → i−1. first-token: i → 0, i > 0 in self-attention. delimiter: i → another token that is
    special or punctuation, position 0 aside. duplicate: i → j ≠ i with the same token. induction: i → j+1 ≠ i
    where j ≠ i has i's token: what followed it the other time.
    """
    n, m = visible.shape
    first = torch.zeros(n, m, dtype=torch.bool)
    first[(0 if is_cross else 1) :, 0] = True
    delimiter = torch.tensor(
        [is_delimiter(token, special=own) for token, own in zip(keys.tokens, keys.is_special, strict=True)]
    )
    delimiter[0] = False
    own = torch.zeros(n, m, dtype=torch.bool) if is_cross else torch.eye(n, dtype=torch.bool)
    found = {HeadPattern.FIRST: first, HeadPattern.DELIMITER: delimiter & ~own}
    if not is_cross:
        found |= _self_attention_targets(torch.tensor(keys.ids))
    return {pattern: looks.to(visible.device) & visible for pattern, looks in found.items()}


def _self_attention_targets(ids: Int[Tensor, " position"]) -> dict[HeadPattern, QueryKeyMask]:
    n = len(ids)
    itself = torch.eye(n, dtype=torch.bool)
    previous = torch.zeros(n, n, dtype=torch.bool)
    previous[1:, :-1] = torch.eye(n - 1, dtype=torch.bool)
    duplicate = (ids[:, None] == ids) & ~itself
    induction = torch.zeros(n, n, dtype=torch.bool)
    induction[:, 1:] = duplicate[:, :-1]
    return {
        HeadPattern.PREVIOUS: previous, HeadPattern.DUPLICATE: duplicate, HeadPattern.INDUCTION: induction & ~itself
    }  # fmt: skip


def is_delimiter(token: str, *, special: bool) -> bool:
    text = token.strip()
    return special or (bool(text) and all(unicodedata.category(letter).startswith("P") for letter in text))


def score_pattern(
    weights: LayerHeadWeights, visible: QueryKeyMask, pattern: HeadPattern, places: dict[HeadPattern, QueryKeyMask]
) -> Float[Tensor, "layer head"]:
    """From 0 to 1.

    bag-of-words: the row's entropy over its greatest, log(keys it may see), mean over queries that see at least 2.
    All others: the weight that goes where the pattern says, mean over the queries that have such a place.
    """
    asked = _queries_with_targets(visible, pattern, places)
    if not bool(asked.any()):
        return weights.new_zeros(weights.shape[:2])
    if pattern is HeadPattern.BAG:
        return (_attention_entropy(weights)[..., asked] / visible.sum(-1)[asked].to(weights).log()).mean(-1).clamp(0, 1)
    return (weights * places[pattern]).sum(-1)[..., asked].mean(-1).clamp(0, 1)


def best_pattern(scores: Float[Tensor, " pattern"], n_queries: list[int]) -> HeadPattern | None:
    """The pattern with the greatest score that is at least 0.4; bag-of-words where no other is, from 0.95 on."""
    even = PATTERNS.index(HeadPattern.BAG)
    enough = torch.tensor([n >= MIN_QUERIES for n in n_queries], device=scores.device)
    pointed = scores.where(enough, -1.0)
    pointed[even] = -1.0
    best = int(pointed.argmax())
    if pointed[best] >= MIN_SCORE:
        return PATTERNS[best]
    return HeadPattern.BAG if scores[even] >= MIN_UNIFORMITY else None


def _queries_with_targets(visible: QueryKeyMask, pattern: HeadPattern, places: dict[HeadPattern, QueryKeyMask]) -> Bool[Tensor, " query"]:
    if pattern is HeadPattern.BAG:
        return visible.sum(-1) > 1
    return places[pattern].any(-1) if pattern in places else torch.zeros_like(visible[:, 0])


def _attention_entropy(weights: LayerHeadWeights) -> Float[Tensor, "layer head query"]:
    return torch.special.entr(weights).sum(-1)
