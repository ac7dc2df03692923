"""Negative log-likelihood of documents under a GPT."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.errors import InputError
from qkv.models import GPT
from qkv.tasks.batches import batch_by_length
from qkv.tensors import IGNORE_INDEX

SCORING_BATCH_TOKENS = {"cpu": 4096}
"""Maximum tokens per batch by device type, including padding. On a CPU, larger batches are not faster."""
DEFAULT_SCORING_BATCH_TOKENS = 1 << 16
LOGITS_CHUNK_SIZE = 1024
"""Number of positions whose logits are computed at once. All logits of a batch could take gigabytes."""
PREFETCH_BATCHES = 32
"""Documents for this many batches are read ahead and sorted by length, to reduce padding."""


@dataclass(frozen=True)
class DocumentWindow:
    """A part of a document that fits into the context. `ids[:-1]` are the inputs and `ids[1:]` the targets."""

    document: int
    ids: list[int]
    n_scored: int
    """Number of leading targets that were already scored in the previous window."""


def split_into_windows(document: int, ids: list[int], context_length: int) -> Iterator[DocumentWindow]:
    """Split a document that is longer than the context into overlapping windows.

    From the second window on, the first half only provides context and the second half is scored. Every token is scored
    once and, except in the first window, has at least half a context before it.
    """
    start, scored = 0, 1
    while scored < len(ids):
        part = ids[start : start + context_length + 1]
        yield DocumentWindow(document, part, scored - start - 1)
        scored = start + len(part)
        start = scored - 1 - context_length // 2


def document_losses(
    model: GPT, documents: Iterable[list[int]], *, tokens_at_once: int | None = None
) -> Iterator[float]:
    """Yield the summed negative log-likelihood of each document's ids except the first, in nats and in document order.

    `tokens_at_once` is the batch size in tokens and defaults to a value for the device.
    """
    if tokens_at_once is None:
        device = model.embedding.token.weight.device
        tokens_at_once = SCORING_BATCH_TOKENS.get(device.type, DEFAULT_SCORING_BATCH_TOKENS)
    if not model.config.causal:
        raise InputError(
            "a model with causal=False attends to the tokens it would predict, so it cannot score documents"
        )
    ahead: list[list[int]] = []
    n_ahead = 0
    for ids in documents:
        ahead.append(ids)
        n_ahead += len(ids)
        if n_ahead >= PREFETCH_BATCHES * tokens_at_once:
            yield from _score_documents(model, ahead, tokens_at_once)
            ahead, n_ahead = [], 0
    yield from _score_documents(model, ahead, tokens_at_once)


def _score_documents(model: GPT, documents: list[list[int]], tokens_at_once: int) -> list[float]:
    length = model.config.context_length
    parts = [part for number, ids in enumerate(documents) for part in split_into_windows(number, ids, length)]
    sums = [0.0] * len(documents)
    for places in batch_by_length([len(part.ids) for part in parts], tokens_at_once):
        batch = [parts[place] for place in places]
        for part, loss in zip(batch, _window_losses(model, batch), strict=True):
            sums[part.document] += loss
    return sums


@torch.inference_mode()
def _window_losses(model: GPT, batch: list[DocumentWindow]) -> list[float]:
    ids, targets = (table.to(model.embedding.token.weight.device) for table in _pad_windows(batch))
    # Padding is on the right, where causal attention ignores it, so no padding mask is needed.
    states = model.states(ids)
    rows, columns = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    states, targets = states[rows, columns], targets[rows, columns]
    sums = torch.zeros(len(batch), dtype=torch.float64, device=rows.device)
    for start in range(0, len(rows), LOGITS_CHUNK_SIZE):
        part = slice(start, start + LOGITS_CHUNK_SIZE)
        logits = model.unembedding(states[None, part])[0].float()
        sums.index_add_(0, rows[part], F.cross_entropy(logits, targets[part], reduction="none").double())
    return sums.tolist()


def _pad_windows(batch: list[DocumentWindow]) -> tuple[Tensor, Tensor]:
    longest = max(len(part.ids) for part in batch) - 1
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, part in enumerate(batch):
        whole = torch.tensor(part.ids)
        ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, part.n_scored : len(whole) - 1] = whole[1 + part.n_scored :]
    return ids, targets
