"""Encode texts with a BERT model in batches of similar length."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qkv.accel.cpu.encoder import create_cpu_encoder
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.accel.cuda.packed_encoder import PackedEncoder, TokenRows, pack_by_length, supports_varlen_attention
from qkv.errors import InputError
from qkv.generation.decoder import right_pad_sequences
from qkv.models import BERT
from qkv.tasks.batches import batch_by_length
from qkv.tensors import AttentionMask, Ids, Residual

ENCODER_BATCH_TOKENS = {"cpu": 512}
"""The maximum number of tokens per batch, keyed by device type.

On a CPU, small batches are fastest because their activations fit into the CPU cache.
"""
DEFAULT_ENCODER_BATCH_TOKENS = 1 << 16


@dataclass(frozen=True)
class EncodedBatch:
    """The final states of a batch of texts, padded on the right."""

    indices: list[int]
    """The indices of the texts in this batch."""
    ids: Ids
    attention_mask: AttentionMask
    states: Residual


class BERTBatchEncoder:
    """An encoder that computes the final states of texts with a BERT model.

    On a GPU with 16-bit weights, texts are packed into rows without padding. Otherwise, they are processed in padded
    batches. On a CPU, supported models use the CPU encoder engine instead of the eager implementation.
    """

    def __init__(self, model: BERT) -> None:
        self.model = model
        self._prepacked = PrepackedWeights(model)
        self._compiled: PackedEncoder | None = None

    def compile(self) -> None:
        """Compile the encoder.

        The first batch of each size triggers a compilation, after which batches of this size run faster.
        """
        if not supports_varlen_attention(self.model):
            raise InputError(
                "compilation requires a GPU and 16-bit weights; load the model with device='cuda', dtype='bfloat16'"
            )
        self._compiled = PackedEncoder(self.model, compiled=True)

    def encode_batches(self, ids: TokenRows, segments: TokenRows | None) -> Iterator[EncodedBatch]:
        """Encode all texts, and yield their states in batches sorted by text length.

        `segments` is `None` if all segment ids are 0.
        """
        device, config = self.model.embedding.token.weight.device, self.model.config
        lengths = [len(row) for row in ids]
        packed_encoder = (
            (self._compiled or PackedEncoder(self.model)) if supports_varlen_attention(self.model) else None
        )
        encode = create_cpu_encoder(self.model, self._prepacked) or self.model
        max_tokens = ENCODER_BATCH_TOKENS.get(device.type, DEFAULT_ENCODER_BATCH_TOKENS)
        for indices in batch_by_length(lengths, max_tokens) if packed_encoder is None else pack_by_length(lengths):
            batch_ids = [ids[index] for index in indices]
            batch_segments = None if segments is None else [segments[index] for index in indices]
            padded_ids, attention_mask = right_pad_sequences(batch_ids, device, config.vocab_size)
            if packed_encoder is not None:
                states = packed_encoder.encode(batch_ids, batch_segments)
            else:
                padded_segments = (
                    None
                    if batch_segments is None
                    else right_pad_sequences(batch_segments, device, config.n_segments)[0]
                )
                states = encode(padded_ids, segments=padded_segments, attention_mask=attention_mask)
            attention_mask = torch.ones_like(padded_ids, dtype=torch.bool) if attention_mask is None else attention_mask
            yield EncodedBatch(indices, padded_ids, attention_mask, states)
