"""From logits to the next token: pure functions, one a setting."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.config import SamplingConfig

NextLogits = Float[Tensor, "batch vocabulary"]
OUT = float("-inf")


def penalise_repetition(logits: NextLogits, said: list[list[int]], penalty: float) -> NextLogits:
    """`said`: each row's ids so far. The rule is that of arXiv:1909.05858."""
    if penalty == 1.0:
        return logits
    logits = logits.clone()
    for row, ids in zip(logits, said, strict=True):
        seen = torch.tensor(sorted(set(ids)), dtype=torch.long, device=logits.device)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    return logits


def keep_top_k(logits: NextLogits, k: int) -> NextLogits:
    """The k likeliest; all that are as likely as the k-th stay."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], OUT)


def keep_top_p(logits: NextLogits, p: float) -> NextLogits:
    """The fewest that reach p together; the likeliest always stays."""
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    is_beyond = ordered.cumsum(-1) - ordered >= p
    return logits.masked_fill(_unsorted(is_beyond, order), OUT)


def keep_min_p(logits: NextLogits, share: float) -> NextLogits:
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < share * probabilities.max(-1, keepdim=True).values, OUT)


def keep_typical(logits: NextLogits, p: float) -> NextLogits:
    """Those whose surprise −log p is nearest to the expected one, until p is reached."""
    log_p = logits.log_softmax(-1)
    surprise = -log_p
    expected = (log_p.exp() * surprise).nansum(-1, keepdim=True)
    order = (surprise - expected).abs().sort(dim=-1).indices
    ordered = log_p.exp().gather(-1, order)
    is_beyond = ordered.cumsum(-1) - ordered >= p
    return logits.masked_fill(_unsorted(is_beyond, order), OUT)


def _unsorted(flags: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(flags).scatter(-1, order, flags)


def adjusted(logits: NextLogits, config: SamplingConfig, said: list[list[int]]) -> NextLogits:
    """The logits after every setting; their softmax is what a sample is drawn from."""
    logits = penalise_repetition(logits.float(), said, config.repetition_penalty)
    if config.temperature == 0:
        return logits.masked_fill(logits < logits.max(-1, keepdim=True).values, OUT)
    logits = logits / config.temperature
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    if config.typical_p is not None:
        logits = keep_typical(logits, config.typical_p)
    return logits


def draw(logits: NextLogits, generators: list[torch.Generator]) -> Int[Tensor, " batch"]:
    """One id a row, with the row's own chance, so that a row's text does not depend on its neighbours."""
    chance = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    reached = logits.double().softmax(-1).cumsum(-1)
    wanted = chance.to(reached.device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
