"""Decode engines run a model one token at a time: their interface, and the eager implementation for each family.

The eager engines call the `forward` methods of the models and define the correct result. `qkv.engines` selects a faster
engine with the same interface if one supports the model.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.errors import InputError
from qkv.generation.sampling import NextLogits
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import KVCache, Source
from qkv.nn.cache import LayerSourceCache
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.tensors import Ids

RowIds = Int[Tensor, " row"]
SequenceIndices = Int[Tensor, " sequence"]
TokenLists = Sequence[Sequence[int]]
CACHE_CHUNK = 256
"""Number of positions by which the KV cache grows at a time, because many sequences end long before their limit."""


@runtime_checkable
class DecodeEngine(Protocol):
    """Runs a model for one call of `generate_tokens` or `translate`.

    The caller calls `prefill` once, then `decode` once per token, and finally `close`. Each sequence may have several
    consecutive rows, which are its beams.
    """

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        """Process one prompt per row and return the logits for the token that follows each prompt.

        An encoder–decoder encodes the `sources` first. Its prompts usually contain only the start token.
        """
        ...

    def decode(self, ids: RowIds) -> NextLogits:
        """Append one token to each row and return the logits for the following token."""
        ...

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        """Continue with only the given rows, in the given order. Rows may be repeated.

        `sequences` lists the sequences that remain, or is `None` if all of them remain. Engines that store state per
        sequence, such as an encoded source, need this list. The caller guarantees that the first `common_prefix` new
        tokens are equal in all rows of a sequence, so the state of these tokens does not have to be copied.
        """
        ...

    def close(self) -> None:
        """Release the memory of the engine so that another generation can use it."""
        ...


@runtime_checkable
class SamplingEngine(DecodeEngine, Protocol):
    """Decode engine that can also choose tokens, so the host reads several tokens at a time."""

    tokens_per_sync: int
    """Maximum number of tokens per row in one call of `sample_tokens`."""

    def can_sample(self, sampling: SamplingConfig) -> bool:
        """Return whether the engine supports all sampling settings."""
        ...

    def set_next_ids(self, ids: RowIds) -> None:
        """Set the token of each row that the next call of `sample_tokens` processes first."""
        ...

    def sample_tokens(
        self, n: int, sampling: SamplingConfig, uniform: Float[Tensor, "step row"] | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Generate `n` tokens per row and return their ids and log-probabilities, each of shape (step, row).

        `uniform` contains one random number in [0, 1) per token, or is `None` at temperature 0.
        """
        ...


@runtime_checkable
class EngineFactory(Protocol):
    """Creates a decode engine for `batch` sequences of at most `capacity` tokens that are fed to the model."""

    def __call__(self, model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine: ...


def eager_engine(model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine:
    """Create an engine that calls the `forward` methods of the model."""
    match model:
        case GPT():
            return GPTDecodeEngine(model, model.new_cache(batch=batch, capacity=capacity, growth_step=CACHE_CHUNK))
        case Seq2Seq():
            return Seq2SeqDecodeEngine(model, model.new_cache(batch=batch, capacity=capacity))
        case RNNSeq2Seq():
            return RNNDecodeEngine(model)


class GPTDecodeEngine:
    """Eager engine for a GPT with a KV cache. Rows may have different lengths."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        self.cache = cache
        self._model = model
        self._shortest_prompt = 0

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:  # noqa: ARG002
        ids, attention_mask = right_pad_sequences(prompts, self.cache.lengths.device, self._model.config.vocab_size)
        states = self._model.hidden_states(ids, attention_mask=attention_mask, cache=self.cache)
        self._shortest_prompt = min(len(prompt) for prompt in prompts)
        # Only the last token of each prompt needs logits.
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=states.device)
        states = states[torch.arange(len(prompts), device=states.device), last]
        return self._model.unembedding(states[:, None])[:, 0]

    def decode(self, ids: RowIds) -> NextLogits:
        return self._model(ids[:, None], cache=self.cache)[:, 0]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        # If sequences are dropped, the prefixes of the remaining rows move too.
        self.cache.reorder(rows, common_prefix=0 if sequences is not None else self._shortest_prompt + common_prefix)

    def close(self) -> None:
        pass


class Seq2SeqDecodeEngine:
    """Eager engine for an encoder–decoder. All rows of a sequence share its encoded source without copies."""

    def __init__(self, model: Seq2Seq, cache: KVCache) -> None:
        self.cache = cache
        self._model = model
        self._source: Source | None = None
        self._prompt_length = 1

    @property
    def source(self) -> Source:
        assert self._source is not None, "prefill must be called before decode"
        return self._source

    def encode(self, sources: TokenLists | Source) -> None:
        """Encode the sources, or use a source that is already encoded."""
        if not isinstance(sources, Source):
            ids, mask = right_pad_sequences(sources, self.cache.lengths.device, self._model.config.source_vocab_size)
            sources = self._model.encode(ids, attention_mask=mask)
        self._source = sources.materialize_mask()

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | Source | None = None) -> NextLogits:
        assert sources is not None, "an encoder–decoder requires sources"
        self.encode(sources)
        ids = _equal_length_prompts(prompts, self.cache.lengths.device, self._model.config.vocab_size)
        self._prompt_length = ids.shape[1]
        return self._model.decode(ids, self.source, cache=self.cache)[:, -1]

    def decode(self, ids: RowIds) -> NextLogits:
        return self._model.decode(ids[:, None], self.source, cache=self.cache)[:, 0]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        unchanged = 0 if sequences is not None else self._prompt_length + common_prefix
        self.cache.reorder(rows, sources=sequences, common_prefix=unchanged)
        if sequences is not None:
            self._source = self.source.reorder(sequences).materialize_mask()

    def close(self) -> None:
        pass


class RNNDecodeEngine:
    """Eager engine for a recurrent encoder–decoder. The recurrent state represents the tokens so far."""

    def __init__(self, model: RNNSeq2Seq) -> None:
        self._model = model
        self._source_cache = LayerSourceCache()

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        assert sources is not None, "an encoder–decoder requires sources"
        device = self._model.embedding.weight.device
        source_ids, attention_mask = right_pad_sequences(sources, device, self._model.config.source_vocab_size)
        start = self._model.encode(source_ids, attention_mask=attention_mask)
        self._source, self._state = start.source.materialize_mask(), start.state
        return self._decode(_equal_length_prompts(prompts, device, self._model.config.vocab_size))

    def decode(self, ids: RowIds) -> NextLogits:
        return self._decode(ids[:, None])

    def _decode(self, ids: Ids) -> NextLogits:
        logits, self._state = self._model.decode(ids, self._source, self._state, cache=self._source_cache)
        return logits[:, -1]

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:  # noqa: ARG002
        self._state = tuple(part.index_select(1, rows) for part in self._state)
        if sequences is not None:
            self._source = self._source.reorder(sequences).materialize_mask()
            self._source_cache.reorder(sequences)

    def close(self) -> None:
        pass


def _equal_length_prompts(prompts: TokenLists, device: torch.device, vocab_size: int) -> Ids:
    """Return the prompts of an encoder–decoder as one tensor, or raise an error if their lengths differ."""
    ids, attention_mask = right_pad_sequences(prompts, device, vocab_size)
    if attention_mask is not None:
        lengths = sorted({len(prompt) for prompt in prompts})
        raise InputError(f"the prompts of an encoder–decoder must have the same length, got lengths {lengths}")
    return ids


def right_pad_sequences(
    sequences: TokenLists, device: torch.device, vocab_size: int
) -> tuple[Int[Tensor, "sequence position"], Bool[Tensor, "sequence position"] | None]:
    """Pad token sequences on the right with 0 and return the padded ids with their attention mask.

    The mask is `None` if all sequences have the same length.
    """
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    ids = torch.tensor([[*sequence, *[0] * (longest - n)] for sequence, n in zip(sequences, lengths, strict=True)])
    # Check before the copy, because on a GPU an id outside the vocabulary would end the process with a device assert.
    check_ids_shape_dtype_range(ids, vocab_size)
    ids = ids.to(device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
