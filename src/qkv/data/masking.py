"""Which words are hidden from BERT, and behind what.

A row's words are put in a random order, and the first 15 % of it are asked for. From a random one of these on, round
along that order, 80 % become [MASK], 10 % any word, and the rest stay. In every row the shares are exact but for
rounding, and the rounding is drawn, so they are exact on average too. All is a function of (seed, example).
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from qkv.choices import Role
from qkv.config.masking import MaskingConfig
from qkv.data.order import Indices, keyed_draws, keyed_fractions
from qkv.data.windows import NOTHING
from qkv.errors import InputError
from qkv.text import Tokenizer

_UNUSED = np.iinfo(np.int64).max
_ONE = np.uint64(1)
_BLANKS = ("Ġ", "▁")


class Disguise(IntEnum):
    """What stands where a word is asked for."""

    MASK = 0
    RANDOM = 1
    ITSELF = 2


class _Draw(IntEnum):
    """What a number is drawn for: each has a stream of its own. `next_sentence` has those from 0 on."""

    ORDER = 10
    ROUNDING = 11
    WORD = 12


@dataclass(frozen=True)
class Masked:
    ids: Indices
    places: Indices
    """Where words are asked for, in order; every row has the same number of slots."""
    targets: Indices
    """The words that stood there; NOTHING in the slots a row does not need, whose place is 0."""


class Masking:
    """Hides words of rows up to `length` tokens, special ones included."""

    def __init__(self, tokenizer: Tokenizer, config: MaskingConfig, *, length: int) -> None:
        self.config = config
        self.mask_id = tokenizer.id_of(Role.MASK)
        self.n_slots = config.n_slots(length)
        self._is_special = np.zeros(tokenizer.vocab_size, bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._continues = _continuations(tokenizer) if config.whole_words else None

    def __call__(self, ids: Indices, examples: Indices, *, seed: int) -> Masked:
        """`examples`: each row's number, from which its chance is drawn."""
        order, n_words = self._random_order(ids, examples, seed)
        rounding, turn = keyed_fractions(examples * 2 + np.arange(2)[:, None], seed, _Draw.ROUNDING)[..., None]
        wanted = np.floor(self.config.hidden_share * n_words + rounding).astype(np.int64)
        wanted = np.minimum(np.clip(wanted, 1, self.n_slots), n_words)
        if self._continues is None:
            order = order[:, : self.n_slots]
            chosen = np.arange(self.n_slots) < wanted
        else:
            chosen = _whole(order, np.take_along_axis(self._word_starts(ids), order, 1), wanted, n_words)
        along = ((np.cumsum(chosen, 1) - 1) / np.maximum(chosen.sum(1, keepdims=True), 1) + turn) % 1.0
        limits = (self.config.mask_share, self.config.mask_share + self.config.random_share)
        disguises = np.searchsorted(limits, along, side="right")
        return self._hide(ids, np.where(chosen, order * len(Disguise) + disguises, _UNUSED), examples, seed)

    def _random_order(self, ids: Indices, examples: Indices, seed: int) -> tuple[Indices, Indices]:
        """Each row's places in random order, its words first, pieces of a whole word together; how many words."""
        length = ids.shape[1]
        keys = keyed_draws(examples[:, None] * length + np.arange(length), seed, _Draw.ORDER)
        if self._continues is not None:
            keys = np.take_along_axis(keys, self._word_starts(ids), 1)
        # The place is the key's end: a plain sort, the same on every machine, brings the places in order.
        n_bits = np.uint64((length - 1).bit_length())
        keys = ((keys >> n_bits >> _ONE) << n_bits) | np.arange(length, dtype=np.uint64)
        is_special = self._is_special[ids]
        keys[is_special] |= _ONE << np.uint64(63)
        keys.sort(axis=1)
        places = (keys & ((_ONE << n_bits) - _ONE)).astype(np.int64)
        return places, length - is_special.sum(1, keepdims=True)

    def _word_starts(self, ids: Indices) -> Indices:
        """For each place, where its word begins."""
        assert self._continues is not None
        return np.maximum.accumulate(np.where(self._continues[ids], 0, np.arange(ids.shape[1])), axis=1)

    def _hide(self, ids: Indices, packed: Indices, examples: Indices, seed: int) -> Masked:
        """`packed`: place and disguise of what is chosen, as one number, so that one sort orders both."""
        packed = np.sort(packed, axis=1)[:, : self.n_slots]
        is_used = packed != _UNUSED
        places, disguises = np.divmod(np.where(is_used, packed, Disguise.ITSELF), len(Disguise))
        there = np.take_along_axis(ids, places, 1)
        slots = examples[:, None] * self.n_slots + np.arange(self.n_slots)
        drawn = (keyed_fractions(slots, seed, _Draw.WORD) * len(self._ordinary)).astype(np.int64)
        shown = np.where(disguises == Disguise.RANDOM, self._ordinary[drawn], there)
        shown[disguises == Disguise.MASK] = self.mask_id
        hidden = ids.copy()
        np.put_along_axis(hidden, places, shown, 1)
        return Masked(hidden, places, np.where(is_used, there, NOTHING))


def _whole(order: Indices, words: Indices, wanted: Indices, n_words: Indices) -> NDArray[np.bool_]:
    """Which of an order's places are chosen; a word that the limit would cut is left out for later ones of one piece.

    `words`: the word that each place of the order belongs to.
    """
    ranks = np.arange(order.shape[1])
    at_limit = np.take_along_axis(words, np.minimum(wanted, order.shape[1] - 1), 1)
    is_cut = (words == at_limit) & (wanted < n_words)
    chosen = (ranks < wanted) & ~is_cut
    is_alone = (words != np.roll(words, 1, 1)) & (words != np.roll(words, -1, 1))
    later = is_alone & ~is_cut & (ranks >= wanted) & (ranks < n_words)
    return chosen | (later & (np.cumsum(later, 1) <= wanted - chosen.sum(1, keepdims=True)))


def _continuations(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which ids go on with a word: ##pieces in a WordPiece, those without a blank before them in other vocabularies."""
    tokens = [tokenizer.token(number) for number in range(tokenizer.vocab_size)]
    if any(token.startswith("##") for token in tokens):
        return np.array([token.startswith("##") for token in tokens])
    if any(token.startswith(_BLANKS) for token in tokens):
        return np.array(
            [number not in tokenizer.special_ids and not t.startswith(_BLANKS) for number, t in enumerate(tokens)]
        )
    raise InputError("whole_words: this tokenizer's pieces do not show where a word begins")
