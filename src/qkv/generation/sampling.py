"""Sample the next token from logits with repetition penalty, temperature, top-k, top-p, min-p or typical sampling."""

from math import log

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.config import SamplingConfig

NextLogits = Float[Tensor, "batch vocabulary"]
SeenMask = Bool[Tensor, "batch vocabulary"]
"""Mask that is `True` for the token ids that a row already contains."""
FILTERED = float("-inf")
MIN_TEMPERATURE = 1e-30
"""Smallest divisor that float32 supports. At this temperature, the most probable token already has probability 1."""

ARGMAX_BLOCK, MIN_ARGMAX_BLOCKS = 256, 64
"""Block size of `argmax_by_blocks`, and the number of blocks from which it is faster than `argmax`."""


def apply_repetition_penalty(logits: NextLogits, seen_mask: SeenMask, penalty: float) -> NextLogits:
    """Lower the logits of tokens that were already generated (arXiv:1909.05858).

    Positive logits are divided by the penalty and negative ones are multiplied, so both decrease.
    """
    return torch.where(seen_mask, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: NextLogits, temperature: float) -> NextLogits:
    """Divide the logits by the temperature.

    At temperature 0, only the most probable token remains, or the first of them if several are equally probable.
    """
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, FILTERED).scatter(-1, best, logits.gather(-1, best))
    # Subtract the maximum first so that dividing by a small temperature cannot overflow to infinity.
    return (logits - logits.max(-1, keepdim=True).values) / max(temperature, MIN_TEMPERATURE)


def keep_top_k(logits: NextLogits, k: int) -> NextLogits:
    """Keep the `k` most probable tokens, and any other tokens as probable as the k-th."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], FILTERED)


def keep_top_p(logits: NextLogits, p: float, *, n_candidates: int | None = None) -> NextLogits:
    """Keep the smallest set of most probable tokens whose total probability reaches `p` (nucleus sampling).

    The most probable token is always kept. `n_candidates` is the number of most probable tokens to sort, which must be
    enough for the set. By default, it is derived from the probabilities, which the host has to read.
    """
    if p >= 1:
        return logits
    probabilities = logits.softmax(-1)
    if n_candidates is None:
        # Tokens with a probability below (1 − p) / vocab_size cannot be in the set because their total probability is
        # less than 1 − p. The factor 1/2 is a margin for rounding. Only the remaining tokens need to be sorted. Sorting
        # the full vocabulary would take longer than a step of a small model.
        n_candidates = int((probabilities > (1 - p) / logits.shape[-1] / 2).sum(-1).max())
    sorted_probabilities, order = probabilities.topk(n_candidates)
    return _keep_until_cumulative(p, logits, sorted_probabilities, order)


def keep_min_p(logits: NextLogits, min_p: float) -> NextLogits:
    """Keep tokens with at least `min_p` times the probability of the most probable token."""
    if min_p == 0:
        return logits
    return logits.masked_fill(logits < logits.max(-1, keepdim=True).values + log(min_p), FILTERED)


def keep_typical(logits: NextLogits, p: float) -> NextLogits:
    """Keep the tokens whose surprisal is closest to the entropy, until their total probability reaches `p`."""
    if p >= 1:
        return logits
    log_p = logits.log_softmax(-1)
    probabilities = log_p.exp()
    entropy = -(probabilities * log_p).nansum(-1, keepdim=True)
    order = (-log_p - entropy).abs().argsort(dim=-1)
    return _keep_until_cumulative(p, logits, probabilities.gather(-1, order), order)


def _keep_until_cumulative(p: float, logits: Tensor, sorted_probabilities: Tensor, order: Tensor) -> Tensor:
    """Keep the tokens in `order` until their cumulative probability reaches `p`, and filter out all others.

    `order` may contain only part of the vocabulary. Tokens that it does not contain are filtered out.
    """
    is_beyond = sorted_probabilities.cumsum(-1) - sorted_probabilities >= p
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).scatter(-1, order, is_beyond), FILTERED)


def process_logits(
    logits: NextLogits,
    config: SamplingConfig,
    seen_mask: SeenMask | None = None,
    *,
    n_candidates: int | None = None,
) -> NextLogits:
    """Apply all sampling settings. The next token is sampled from the softmax of the result.

    `seen_mask` is required only if `config.repetition_penalty` is not 1. For `n_candidates`, see `keep_top_p`.
    """
    logits = _at_least_float32(logits)
    if config.repetition_penalty != 1.0 and seen_mask is not None:
        logits = apply_repetition_penalty(logits, seen_mask, config.repetition_penalty)
    logits = apply_temperature(logits, config.temperature)
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p, n_candidates=n_candidates)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    if config.typical_p is not None:
        logits = keep_typical(logits, config.typical_p)
    return logits


def sample_inverse_cdf(logits: NextLogits, uniform: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Sample one id per row by inverting the cumulative distribution.

    `uniform` contains one number in [0, 1) per row. The result is the first id whose cumulative probability exceeds it.
    """
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    # Scale by the total, which differs slightly from 1 because of rounding.
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def choose_next_ids(
    logits: NextLogits,
    config: SamplingConfig,
    *,
    seen_mask: SeenMask | None,
    uniform: Float[Tensor, " batch"] | None,
    n_candidates: int | None = None,
) -> Int[Tensor, " batch"]:
    """Sample the next id of each row, or choose the most probable id at temperature 0.

    For `n_candidates`, see `keep_top_p`.
    """
    if config.temperature > 0:
        assert uniform is not None, "sampling requires uniform random numbers"
        return sample_inverse_cdf(process_logits(logits, config, seen_mask, n_candidates=n_candidates), uniform)
    if config.repetition_penalty != 1.0 and seen_mask is not None:
        logits = apply_repetition_penalty(_at_least_float32(logits), seen_mask, config.repetition_penalty)
    return argmax_by_blocks(logits)


def argmax_by_blocks(logits: NextLogits) -> Int[Tensor, " batch"]:
    """Compute `argmax` over the vocabulary. Ties are resolved in favor of the first id.

    On a CPU, `argmax` is not vectorized, but `amax` is. For large vocabularies, it is faster to find the block with
    the maximum by `amax` and to compute `argmax` only within that block.
    """
    n_blocks = logits.shape[-1] // ARGMAX_BLOCK
    if n_blocks < MIN_ARGMAX_BLOCKS:
        return logits.argmax(-1)
    n_even = n_blocks * ARGMAX_BLOCK
    block_max = logits[:, :n_even].unflatten(-1, (n_blocks, ARGMAX_BLOCK)).amax(-1)
    if n_even < logits.shape[-1]:
        block_max = torch.cat((block_max, logits[:, n_even:].amax(-1, keepdim=True)), dim=-1)
    # If the last block is short, it is extended to the left by logits that are lower than its maximum.
    first = (block_max.argmax(-1, keepdim=True) * ARGMAX_BLOCK).clamp_(max=logits.shape[-1] - ARGMAX_BLOCK)
    return (
        first + logits.gather(-1, first + torch.arange(ARGMAX_BLOCK, device=logits.device)).argmax(-1, keepdim=True)
    ).squeeze(-1)


def gather_log_probabilities(logits: NextLogits, ids: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return the log-probability of each row's id according to the model, before applying any sampling settings."""
    return _at_least_float32(logits).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
