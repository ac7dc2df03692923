"""Encode texts with a BERT model in batches of similar length."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkv.choices import BackendName
from qkv.engines import EncodeEngine, encode_engine
from qkv.generation.decode_engine import TokenLists, right_pad_sequences
from qkv.models import BERT
from qkv.tensors import AttentionMask, Ids, Residual


@dataclass(frozen=True)
class EncodedBatch:
    """The final states of a batch of texts, padded on the right."""

    indices: list[int]
    """The indices of the texts in this batch."""
    ids: Ids
    attention_mask: AttentionMask
    states: Residual


class BERTBatchEncoder:
    """An encoder that computes the final states of texts with a BERT model, using the given backend."""

    def __init__(self, model: BERT, *, backend: str = BackendName.AUTO) -> None:
        self.model = model
        self.backend = backend
        self._compiled: EncodeEngine | None = None

    def compile(self) -> None:
        """Compile the encoder.

        The first batch of each size triggers a compilation, after which batches of this size run faster.
        """
        self._compiled = encode_engine(self.model, backend=self.backend, compile=True)

    def encode_batches(self, ids: TokenLists, segments: TokenLists | None) -> Iterator[EncodedBatch]:
        """Encode all texts, and yield their states in batches sorted by text length.

        `segments` is `None` if all segment ids are 0.
        """
        device = self.model.embedding.token.weight.device
        engine = self._compiled or encode_engine(self.model, backend=self.backend)
        for indices in engine.group([len(row) for row in ids]):
            batch_ids = [ids[index] for index in indices]
            padded_ids, attention_mask = right_pad_sequences(batch_ids, device, self.model.config.vocab_size)
            states = engine.encode(batch_ids, None if segments is None else [segments[index] for index in indices])
            attention_mask = torch.ones_like(padded_ids, dtype=torch.bool) if attention_mask is None else attention_mask
            yield EncodedBatch(indices, padded_ids, attention_mask, states)
