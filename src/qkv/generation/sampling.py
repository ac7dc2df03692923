"""From logits to the next token: pure functions, one a setting."""

from math import log

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.config import SamplingConfig

NextLogits = Float[Tensor, "batch vocabulary"]
SeenMask = Bool[Tensor, "batch vocabulary"]
"""True at the ids that a row holds already."""
OUT = float("-inf")
COLDEST = 1e-30
"""float32 cannot divide by less; the likeliest has had all the probability long before."""

BLOCK, MANY = 256, 64
"""Numbers that are looked at at once where the greatest is sought, and blocks of them from which on that pays."""


def apply_repetition_penalty(logits: NextLogits, said: SeenMask, penalty: float) -> NextLogits:
    """The rule of arXiv:1909.05858: what was said loses, whichever sign its logit has."""
    return torch.where(said, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: NextLogits, temperature: float) -> NextLogits:
    """Logits over temperature; at 0 the likeliest alone is left, the first of them where several are."""
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, OUT).scatter(-1, best, logits.gather(-1, best))
    # The greatest becomes 0 first, so that no logit over a small temperature is infinite.
    return (logits - logits.max(-1, keepdim=True).values) / max(temperature, COLDEST)


def keep_top_k(logits: NextLogits, k: int) -> NextLogits:
    """The k likeliest; all that are as likely as the k-th stay."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], OUT)


def keep_top_p(logits: NextLogits, p: float) -> NextLogits:
    """The fewest that reach p together; the likeliest always stays."""
    if p >= 1:
        return logits
    probabilities = logits.softmax(-1)
    # What is rarer than (1 − p)/V is not among them, for all of it together is less than 1 − p; half of that is
    # safe from rounding. So few need to be put in order, where sorting thousands would cost more than a model's step.
    # A GPU would have to wait for their number.
    n = logits.shape[-1]
    if not logits.is_cuda:
        n = int((probabilities > (1 - p) / n / 2).sum(-1).max())
    ordered, order = probabilities.topk(n)
    return _keep_until(p, logits, ordered, order)


def keep_min_p(logits: NextLogits, share: float) -> NextLogits:
    """Those at least this share as likely as the likeliest."""
    if share == 0:
        return logits
    return logits.masked_fill(logits < logits.max(-1, keepdim=True).values + log(share), OUT)


def keep_typical(logits: NextLogits, p: float) -> NextLogits:
    """Those whose surprise −log p is nearest to the expected one, until p is reached."""
    if p >= 1:
        return logits
    log_p = logits.log_softmax(-1)
    probabilities = log_p.exp()
    expected = -(probabilities * log_p).nansum(-1, keepdim=True)
    order = (-log_p - expected).abs().argsort(dim=-1)
    return _keep_until(p, logits, probabilities.gather(-1, order), order)


def _keep_until(p: float, logits: Tensor, ordered: Tensor, order: Tensor) -> Tensor:
    """What stands in `order` before p is reached; what does not stand there is out."""
    is_beyond = ordered.cumsum(-1) - ordered >= p
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).scatter(-1, order, is_beyond), OUT)


def process_logits(logits: NextLogits, config: SamplingConfig, said: SeenMask | None = None) -> NextLogits:
    """The logits after every setting; their softmax is what a token is drawn from.

    `said` is needed where repetition is penalised.
    """
    logits = _wide(logits)
    if config.repetition_penalty != 1.0 and said is not None:
        logits = apply_repetition_penalty(logits, said, config.repetition_penalty)
    logits = apply_temperature(logits, config.temperature)
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    if config.typical_p is not None:
        logits = keep_typical(logits, config.typical_p)
    return logits


def sample_inverse_cdf(logits: NextLogits, chance: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """The id at which the probabilities, added up from id 0, pass `chance`: a number from 0 up to 1, one a row."""
    reached = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    wanted = chance.double()[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def choose_next_ids(
    logits: NextLogits, config: SamplingConfig, *, said: SeenMask | None, chance: Float[Tensor, " batch"] | None
) -> Int[Tensor, " batch"]:
    """The next id of each row: `draw` from `adjusted`; the likeliest, without any drawing, at temperature 0."""
    if config.temperature > 0:
        assert chance is not None, "a draw needs chance"
        return sample_inverse_cdf(process_logits(logits, config, said), chance)
    if config.repetition_penalty != 1.0 and said is not None:
        logits = apply_repetition_penalty(_wide(logits), said, config.repetition_penalty)
    return argmax_by_blocks(logits)


def argmax_by_blocks(logits: NextLogits) -> Int[Tensor, " batch"]:
    """`argmax`, the first of equals; torch's own looks at one number after another on a CPU, `amax` at many at once."""
    n_blocks = logits.shape[-1] // BLOCK
    if logits.is_cuda or n_blocks < MANY:
        return logits.argmax(-1)
    n_even = n_blocks * BLOCK
    highest = logits[:, :n_even].unflatten(-1, (n_blocks, BLOCK)).amax(-1)
    if n_even < logits.shape[-1]:
        highest = torch.cat((highest, logits[:, n_even:].amax(-1, keepdim=True)), dim=-1)
    # The last block may be short: then it is taken with some of the numbers before it, which are all lower.
    first = (highest.argmax(-1, keepdim=True) * BLOCK).clamp_(max=logits.shape[-1] - BLOCK)
    return (first + logits.gather(-1, first + torch.arange(BLOCK)).argmax(-1, keepdim=True)).squeeze(-1)


def gather_log_probabilities(logits: NextLogits, ids: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Of each row's id under the model itself, before any setting."""
    return _wide(logits).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
