"""A model in the midst of several texts: what sampling and beam search need of it, and no more."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.generation.cpu_decode_engine import CPUDecodeEngine
from qkv.generation.cuda_decode_step import CUDADecodeStep
from qkv.generation.sampling import NextLogits
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.models.rnn import RNNSource
from qkv.nn import Source, SourceCache, check_ids

Rows = Int[Tensor, " row"]
Texts = Int[Tensor, " text"]
CHUNK = 256
"""Tokens a row that a cache takes memory for at a time: many texts end long before their limit."""


@runtime_checkable
class Decoder(Protocol):
    """Holds the texts so far, one a row, as a cache or in any other way."""

    def step(self, ids: Rows) -> NextLogits:
        """One more token a row; the logits of the token after it."""
        ...

    def reorder(self, rows: Rows, *, sequences: Texts | None = None, common_prefix: int = 0) -> None:
        """Go on with these rows, in this order, repeats allowed.

        All texts have equally many rows, side by side. `sequences` says which of them are left; None: all. A model
        that keeps something for each text (a source) and not for each row needs to know. `common_prefix`: so many of the
        new tokens are the same in all rows of a text, so that nothing of them needs to move.
        """
        ...


class GPTDecoder:
    """A GPT with its cache; every row is a text of its own length."""

    def __init__(
        self,
        model: GPT,
        *,
        batch: int,
        capacity: int,
        lean: CPUDecodeEngine | None = None,
        gpu: CUDADecodeStep | None = None,
    ) -> None:
        """`lean`, `gpu`: other roads for the same steps; the latter has a cache of its own."""
        self._model = model
        self._lean, self._gpu = lean, gpu
        self.cache = model.new_cache(batch=batch, capacity=capacity, chunk=CHUNK) if gpu is None else gpu.cache
        self._n_shortest = 0

    @property
    def device(self) -> torch.device:
        return self._model.embedding.token.weight.device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NextLogits:
        """All prompts in one pass; the logits after each prompt's last token."""
        ids, attention_mask = pad_sequences(prompts, self.device, self._model.config.vocab_size)
        states = self._model.states(ids, attention_mask=attention_mask, cache=self.cache)
        n = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._n_shortest = min(len(prompt) for prompt in prompts)
        last = states[torch.arange(len(prompts), device=self.device), n - 1]
        return self._model.unembedding(last[:, None])[:, 0]

    def step(self, ids: Rows) -> NextLogits:
        if self._lean is not None:
            return self._lean(ids, self.cache)
        if self._gpu is not None:
            positions = self.cache.reserve(batch=len(ids), n_new=1)
            return self._gpu.logits_after(ids, positions[:, 0].expand(len(ids)))
        return self._model(ids[:, None], cache=self.cache)[:, 0]

    def reorder(self, rows: Rows, *, sequences: Texts | None = None, common_prefix: int = 0) -> None:
        if len(rows) != self.cache.batch:
            self._gpu = None  # its tensors are for all rows
        self.cache.select(rows, common_prefix=0 if sequences is not None else self._n_shortest + common_prefix)


class Seq2SeqDecoder:
    """The writing half of an encoder–decoder; the rows of one text share its source, which is never copied."""

    def __init__(self, model: Seq2Seq, source: Source, *, capacity: int, lean: CPUDecodeEngine | None = None) -> None:
        """`lean`: another road for the same steps."""
        self._model = model
        self._lean = lean
        self._source = source.materialize_mask()
        self.cache = model.new_cache(batch=source.states.shape[0], capacity=capacity)

    def step(self, ids: Rows) -> NextLogits:
        if self._lean is not None:
            return self._lean(ids, self.cache, self._source)
        return self._model.decode(ids[:, None], self._source, cache=self.cache)[:, 0]

    def reorder(self, rows: Rows, *, sequences: Texts | None = None, common_prefix: int = 0) -> None:
        # Before the new tokens stands the one that begins every text.
        self.cache.select(rows, sources=sequences, common_prefix=0 if sequences is not None else 1 + common_prefix)
        if sequences is not None:
            self._source = self._source.select(sequences).materialize_mask()


class RNNDecoder:
    """The writing half of an RNN encoder–decoder: its state is all that it carries of the text so far."""

    def __init__(self, model: RNNSeq2Seq, start: RNNSource) -> None:
        self._model = model
        self._source = start.source.materialize_mask()
        self._state = start.state
        self._kept = SourceCache()

    def step(self, ids: Rows) -> NextLogits:
        logits, self._state = self._model.decode(ids[:, None], self._source, self._state, cache=self._kept)
        return logits[:, 0]

    def reorder(self, rows: Rows, *, sequences: Texts | None = None, common_prefix: int = 0) -> None:  # noqa: ARG002
        self._state = tuple(part.index_select(1, rows) for part in self._state)
        if sequences is not None:
            self._source = self._source.select(sequences).materialize_mask()
            self._kept.select(sequences)


def encode_sources(
    model: Seq2Seq | RNNSeq2Seq, sources: Sequence[Sequence[int]], *, capacity: int, lean: CPUDecodeEngine | None = None
) -> Decoder:
    """The encoder's pass over sources of any lengths; a decoder that stands before their first token.

    `capacity`: how many tokens a text may hold, the one that begins it included.
    """
    ids, attention_mask = pad_sequences(sources, next(model.parameters()).device, model.config.source_vocab_size)
    match model:
        case Seq2Seq():
            return Seq2SeqDecoder(
                model, model.encode(ids, attention_mask=attention_mask), capacity=capacity, cpu_engine=lean
            )
        case RNNSeq2Seq():
            return RNNDecoder(model, model.encode(ids, attention_mask=attention_mask))


def pad_sequences(
    texts: Sequence[Sequence[int]], device: torch.device, vocab_size: int
) -> tuple[Int[Tensor, "text position"], Bool[Tensor, "text position"] | None]:
    """One table, filled up with 0 on the right, and where tokens stand; None where they all have one length."""
    lengths = [len(text) for text in texts]
    longest = max(lengths)
    ids = torch.tensor([[*text, *[0] * (longest - n)] for text, n in zip(texts, lengths, strict=True)])
    check_ids(ids, vocab_size)  # here, for on a GPU nobody looks
    ids = ids.to(device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
