"""BERT's pre-training batches: [CLS] A [SEP] B [SEP] with words hidden; batch t is a pure function of (seed, t)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.choices import Role
from qkv.config.masking import MaskingConfig
from qkv.data.masking import Masking
from qkv.data.next_sentence import NextSentence, Pairs
from qkv.data.order import Indices, rank_rows
from qkv.data.sentence_store import SentenceStore, stretches
from qkv.data.windows import NOTHING
from qkv.errors import ConfigError, InputError
from qkv.tensors import Ids, IsToken
from qkv.text import Tokenizer


@dataclass(frozen=True)
class MaskedBatch:
    ids: Ids
    segments: Ids
    """0 for [CLS] A [SEP], 1 for B [SEP]."""
    attention_mask: IsToken
    places: Int[Tensor, "batch slot"]
    """Where words are asked for: as many slots in each row, so that shapes stay the same."""
    targets: Int[Tensor, "batch slot"]
    """What stood there, or NOTHING in a slot that is not used."""
    is_wrong: Int[Tensor, "batch"] | None
    """1 where B is from another document (column 1 of the next-sentence head); None: there is no B."""
    n_targets: int
    targets_a_row: float
    """Of the whole batch, also in a part of it: how much a next sentence counts beside a masked word."""

    @property
    def n_tokens(self) -> int:
        return self.ids.numel()

    def split(self, n_rows: int) -> "Iterator[MaskedBatch]":
        """The batch in parts of n_rows rows."""
        for start in range(0, len(self.ids), n_rows):
            rows = slice(start, start + n_rows)
            tensors = {name: tensor[rows] for name, tensor in self._tensors().items()}
            yield replace(self, **tensors, n_targets=int((tensors["targets"] != NOTHING).sum()))

    def to(self, device: torch.device | str) -> "MaskedBatch":
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class MaskedBatches:
    """Endless: epoch follows epoch, each with other stretches, other pairs and other hidden words."""

    source: SentenceStore
    tokenizer: Tokenizer
    config: MaskingConfig
    length: int
    """Tokens of a row, special ones included."""
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        least = self.config.n_specials + 2
        if self.length < least:
            raise ConfigError(f"length={self.length} must be {least} or more: [CLS], [SEP] and two words")
        _ = self.choose, self._masking  # what they refuse is said now

    @cached_property
    def choose(self) -> NextSentence:
        """Which words stand in which example."""
        return NextSentence(
            source=self.source,
            max_words=self.length - self.config.n_specials,
            seed=self.seed,
            pairs=self.config.next_sentence,
            short_share=self.config.short_share,
        )

    @cached_property
    def _masking(self) -> Masking:
        return Masking(self.tokenizer, self.config, length=self.length)

    def epoch(self, t: int) -> float:
        """How many times the text has been seen when batch t begins."""
        return t * self.batch_size / self.choose.n_examples

    def examples(self, t: int, *, rank: int = 0, world: int = 1) -> Indices:
        """The numbers of batch t's examples."""
        if t < 0:
            raise InputError(f"batch {t}: batches are counted from 0")
        first, last = rank_rows(self.batch_size, rank=rank, world=world)
        return np.arange(first, last, dtype=np.int64) + t * self.batch_size

    def batch(self, t: int, *, rank: int = 0, world: int = 1) -> MaskedBatch:
        """This rank's rows of batch t: the ranks' rows in order are the batch of one."""
        examples = self.examples(t, rank=rank, world=world)
        pairs = self.choose(examples)
        lengths = pairs.n_a + pairs.n_b + self.config.n_specials
        places = np.arange(self.length)
        attention_mask = places < lengths[:, None]
        masked = self._masking(self._written(pairs), examples, seed=self.seed)
        n_targets = int((masked.targets != NOTHING).sum())
        is_wrong = torch.from_numpy(pairs.is_wrong.astype(np.int64)) if self.config.next_sentence else None
        return MaskedBatch(
            ids=torch.from_numpy(masked.ids),
            segments=torch.from_numpy((attention_mask & (places > 1 + pairs.n_a[:, None])).astype(np.int64)),
            attention_mask=torch.from_numpy(attention_mask),
            places=torch.from_numpy(masked.places),
            targets=torch.from_numpy(masked.targets),
            is_wrong=is_wrong,
            n_targets=n_targets,
            targets_a_row=n_targets / max(1, len(examples)),
        )

    def _written(self, pairs: Pairs) -> Indices:
        pad, classify, separate = map(self.tokenizer.id_of, (Role.PAD, Role.CLASSIFY, Role.SEPARATE))
        rows = np.arange(len(pairs.a)) * self.length
        ids = np.full(len(rows) * self.length, pad)
        after_a = rows + 1 + pairs.n_a
        ids[rows], ids[after_a] = classify, separate
        segments = [(rows + 1, pairs.a, pairs.n_a)]
        if self.config.next_sentence:
            ids[after_a + 1 + pairs.n_b] = separate
            segments.append((after_a + 1, pairs.b, pairs.n_b))
        for places, starts, lengths in segments:
            ids[stretches(places, lengths)] = self.source.words(starts, lengths)
        return ids.reshape(len(rows), self.length)
