"""Decoder interface for sampling and beam search, with an implementation for each model family."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.generation.sampling import NextLogits
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.models.rnn import RNNSource
from qkv.nn import LayerSourceCache, Source, check_ids_shape_dtype_range

RowIds = Int[Tensor, " row"]
SequenceIndices = Int[Tensor, " sequence"]
CACHE_CHUNK = 256
"""Number of positions by which the KV cache grows at a time, because many sequences end long before their limit."""


@runtime_checkable
class Decoder(Protocol):
    """Incremental decoder that keeps the state of several sequences, such as a KV cache."""

    def step(self, ids: RowIds) -> NextLogits:
        """Append one token to each row and return the logits for the following token."""
        ...

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        """Continue with only the given rows, in the given order. Rows may be repeated.

        Each sequence has the same number of consecutive rows (its beams). `sequences` lists the sequences that remain,
        or is `None` if all sequences remain. This list is needed by decoders that store state per sequence, such as an
        encoded source. The caller guarantees that the first `common_prefix` new tokens are equal in all rows of a
        sequence, so the state of these tokens does not have to be copied.
        """
        ...


class GPTDecoder:
    """Decoder for a GPT with a KV cache. Rows may have different lengths."""

    def __init__(
        self,
        model: GPT,
        *,
        batch: int,
        capacity: int,
        cpu_engine: "CPUDecodeEngine | None" = None,
        cuda_step: "CUDADecodeStep | None" = None,
    ) -> None:
        """Create a decoder. If passed, `cpu_engine` or `cuda_step` replaces the eager implementation.

        `cuda_step` provides its own KV cache.
        """
        self._model = model
        self._cpu_engine, self._cuda_step = cpu_engine, cuda_step
        if cuda_step is None:
            self.cache = model.new_cache(batch=batch, capacity=capacity, growth_step=CACHE_CHUNK)
        else:
            self.cache = cuda_step.cache
        self._shortest_prompt = 0

    @property
    def device(self) -> torch.device:
        return self._model.embedding.token.weight.device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NextLogits:
        """Process all prompts in one forward pass and return the logits after the last token of each prompt."""
        ids, attention_mask = right_pad_sequences(prompts, self.device, self._model.config.vocab_size)
        states = self._model.hidden_states(ids, attention_mask=attention_mask, cache=self.cache)
        n = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._shortest_prompt = min(len(prompt) for prompt in prompts)
        last = states[torch.arange(len(prompts), device=self.device), n - 1]
        return self._model.unembedding(last[:, None])[:, 0]

    def step(self, ids: RowIds) -> NextLogits:
        if self._cpu_engine is not None:
            return self._cpu_engine(ids, self.cache)
        if self._cuda_step is not None:
            positions = self.cache.reserve(batch=len(ids), n_new=1)
            return self._cuda_step.decode_logits(ids, positions[:, 0].expand(len(ids)))
        return self._model(ids[:, None], cache=self.cache)[:, 0]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        if len(rows) != self.cache.batch:
            # The tensors of the CUDA step have a fixed batch size. Fall back to the eager implementation.
            self._cuda_step = None
        self.cache.reorder(rows, common_prefix=0 if sequences is not None else self._shortest_prompt + common_prefix)


class Seq2SeqDecoder:
    """Decoder for an encoder–decoder Transformer. All rows of a sequence share its encoded source without copies."""

    def __init__(
        self, model: Seq2Seq, source: Source, *, capacity: int, cpu_engine: "CPUDecodeEngine | None" = None
    ) -> None:
        """Create a decoder. If passed, `cpu_engine` replaces the eager implementation."""
        self._model = model
        self._cpu_engine = cpu_engine
        self._source = source.materialize_mask()
        self.cache = model.new_cache(batch=source.states.shape[0], capacity=capacity)

    def step(self, ids: RowIds) -> NextLogits:
        if self._cpu_engine is not None:
            return self._cpu_engine(ids, self.cache, self._source)
        return self._model.decode(ids[:, None], self._source, cache=self.cache)[:, 0]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        # The 1 counts the start token, which precedes the new tokens and is the same in all rows.
        self.cache.reorder(rows, sources=sequences, common_prefix=0 if sequences is not None else 1 + common_prefix)
        if sequences is not None:
            self._source = self._source.reorder(sequences).materialize_mask()


class RNNDecoder:
    """Decoder for a recurrent encoder–decoder. The recurrent state represents the tokens so far."""

    def __init__(self, model: RNNSeq2Seq, start: RNNSource) -> None:
        self._model = model
        self._source = start.source.materialize_mask()
        self._state = start.state
        self._source_cache = LayerSourceCache()

    def step(self, ids: RowIds) -> NextLogits:
        logits, self._state = self._model.decode(ids[:, None], self._source, self._state, cache=self._source_cache)
        return logits[:, 0]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:  # noqa: ARG002
        self._state = tuple(part.index_select(1, rows) for part in self._state)
        if sequences is not None:
            self._source = self._source.reorder(sequences).materialize_mask()
            self._source_cache.reorder(sequences)


def encode_sources(
    model: Seq2Seq | RNNSeq2Seq,
    sources: Sequence[Sequence[int]],
    *,
    capacity: int,
    cpu_engine: "CPUDecodeEngine | None" = None,
) -> Decoder:
    """Encode source sequences of any lengths and return a decoder that has not yet read a target token.

    `capacity` is the maximum number of target tokens, including the start token.
    """
    ids, attention_mask = right_pad_sequences(sources, next(model.parameters()).device, model.config.source_vocab_size)
    match model:
        case Seq2Seq():
            source = model.encode(ids, attention_mask=attention_mask)
            return Seq2SeqDecoder(model, source, capacity=capacity, cpu_engine=cpu_engine)
        case RNNSeq2Seq():
            return RNNDecoder(model, model.encode(ids, attention_mask=attention_mask))


def right_pad_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device, vocab_size: int
) -> tuple[Int[Tensor, "sequence position"], Bool[Tensor, "sequence position"] | None]:
    """Pad token sequences on the right with 0 and return the padded ids with their attention mask.

    The mask is `None` if all sequences have the same length.
    """
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    ids = torch.tensor([[*sequence, *[0] * (longest - n)] for sequence, n in zip(sequences, lengths, strict=True)])
    # Check before the copy because the model does not check ids on a GPU, where a check would force a synchronization.
    check_ids_shape_dtype_range(ids, vocab_size)
    ids = ids.to(device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
