"""Compute the negative log-likelihood of documents under a GPT model."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import BackendName
from qkv.data.sampler import batch_by_length
from qkv.engines import accelerated
from qkv.errors import InputError
from qkv.models import GPT
from qkv.tensors import IGNORE_INDEX

SCORING_BATCH_TOKENS = {"cpu": 4096}
"""The maximum number of tokens per batch including padding, keyed by device type.

On a CPU, larger batches are not faster.
"""
DEFAULT_SCORING_BATCH_TOKENS = 1 << 16
LOGITS_CHUNK_SIZE = 1024
"""The number of positions whose logits are computed at once. Storing all logits of a batch could take gigabytes."""
PREFETCH_BATCHES = 32
"""The number of batches that are read ahead so that documents can be sorted by length, which reduces padding."""


@dataclass(frozen=True)
class DocumentWindow:
    """A part of a document that fits into the context. `ids[:-1]` are the inputs, and `ids[1:]` are the targets."""

    document_index: int
    ids: list[int]
    n_already_scored: int
    """The number of leading targets that were already scored in the previous window."""


def split_into_overlapping_windows(
    document_index: int, ids: list[int], context_length: int
) -> Iterator[DocumentWindow]:
    """Split a document that is longer than the context into overlapping windows.

    The first window is scored completely. In each later window, the first half only provides context, and the rest is
    scored. Every token is therefore scored exactly once, and after the first window, at least half a context precedes
    each scored token.
    """
    start, scored = 0, 1
    while scored < len(ids):
        window_ids = ids[start : start + context_length + 1]
        yield DocumentWindow(document_index, window_ids, scored - start - 1)
        scored = start + len(window_ids)
        start = scored - 1 - context_length // 2


def document_nll_sums(
    model: GPT,
    documents: Iterable[list[int]],
    *,
    max_batch_tokens: int | None = None,
    backend: str = BackendName.AUTO,
) -> Iterator[float]:
    """Yield the negative log-likelihood of each document in nats, in document order.

    The result is the sum over all ids of the document except the first. `max_batch_tokens` is the maximum number of
    tokens per batch. The default depends on the device. With `backend="eager"`, no module is replaced by a fused one.
    """
    if max_batch_tokens is None:
        device = model.embedding.token.weight.device
        max_batch_tokens = SCORING_BATCH_TOKENS.get(device.type, DEFAULT_SCORING_BATCH_TOKENS)
    if not model.config.causal:
        raise InputError(
            "a model with causal=False attends to the tokens it would predict, so it cannot score documents"
        )

    def score(pending: list[list[int]]) -> list[float]:
        with nullcontext() if backend == BackendName.EAGER else accelerated(model, "inference"):
            return _document_loss_sums(model, pending, max_batch_tokens)

    pending: list[list[int]] = []
    n_pending = 0
    for ids in documents:
        pending.append(ids)
        n_pending += len(ids)
        if n_pending >= PREFETCH_BATCHES * max_batch_tokens:
            yield from score(pending)
            pending, n_pending = [], 0
    yield from score(pending)


def _document_loss_sums(model: GPT, documents: list[list[int]], max_batch_tokens: int) -> list[float]:
    context_length = model.config.context_length
    windows = [
        window
        for document, ids in enumerate(documents)
        for window in split_into_overlapping_windows(document, ids, context_length)
    ]
    sums = [0.0] * len(documents)
    for indices in batch_by_length([len(window.ids) for window in windows], max_batch_tokens):
        batch = [windows[index] for index in indices]
        for window, loss in zip(batch, _window_losses(model, batch), strict=True):
            sums[window.document_index] += loss
    return sums


@torch.inference_mode()
def _window_losses(model: GPT, batch: list[DocumentWindow]) -> list[float]:
    ids, targets = (table.to(model.embedding.token.weight.device) for table in _pad_inputs_and_targets(batch))
    # Causal attention never attends to the padding on the right, so no padding mask is needed.
    states = model.hidden_states(ids)
    rows, columns = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    states, targets = states[rows, columns], targets[rows, columns]
    sums = torch.zeros(len(batch), dtype=torch.float64, device=rows.device)
    for start in range(0, len(rows), LOGITS_CHUNK_SIZE):
        chunk = slice(start, start + LOGITS_CHUNK_SIZE)
        logits = model.unembedding(states[None, chunk])[0].float()
        sums.index_add_(0, rows[chunk], F.cross_entropy(logits, targets[chunk], reduction="none").double())
    return sums.tolist()


def _pad_inputs_and_targets(batch: list[DocumentWindow]) -> tuple[Tensor, Tensor]:
    longest = max(len(window.ids) for window in batch) - 1
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, window in enumerate(batch):
        token_ids = torch.tensor(window.ids)
        ids[row, : len(token_ids) - 1] = token_ids[:-1]
        targets[row, window.n_already_scored : len(token_ids) - 1] = token_ids[1 + window.n_already_scored :]
    return ids, targets
