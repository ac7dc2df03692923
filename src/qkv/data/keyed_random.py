"""In which order the windows come: a keyed permutation of [0, n), computed and never stored.

A Feistel network over the bits of n, with cycle walking: a value that lands at n or above is sent through again.
The domain is less than 2n, so a value goes through twice on average at most; memory is that of the values asked.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ConfigError

Indices = NDArray[np.int64]

_N_ROUNDS = 8
_MAX_VALUES = 1 << 62


class Permutation:
    """A bijection of [0, n) onto itself, another one for each key; both ends of `key` are whole numbers."""

    def __init__(self, n: int, *key: int) -> None:
        if not 1 <= n <= _MAX_VALUES:
            raise ConfigError(f"a permutation of n={n} values: n goes from 1 to 2^62")
        self.n = n
        n_bits = (n - 1).bit_length()
        self._low = np.uint64(n_bits // 2)
        self._low_mask = np.uint64((1 << (n_bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (n_bits - n_bits // 2)) - 1)
        self._keys = np.frombuffer(_hash_key(*key), dtype="<u8").astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Where each index goes."""
        if indices.size and not 0 <= indices.min() <= indices.max() < self.n:
            raise ConfigError(f"indices {indices.min()} to {indices.max()} of a permutation of {self.n} values")
        values = self._feistel(indices.astype(np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64)

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = values & self._low_mask, values >> self._low
        for first, second in self._keys.reshape(-1, 2):
            low = low ^ (_splitmix64_mix(high ^ first) & self._low_mask)
            high = high ^ (_splitmix64_mix(low ^ second) & self._high_mask)
        return (high << self._low) | low


def keyed_integer(n: int, *key: int) -> int:
    """One number of [0, n), as good as drawn, the same for the same key."""
    return int.from_bytes(_hash_key(*key)[:16], "little") % n


def keyed_uint64(counters: Indices, *key: int) -> NDArray[np.uint64]:
    """64 bits for each counter, as good as drawn: splitmix64's stream of this key, read at any place."""
    first, second = np.frombuffer(_hash_key(*key), dtype="<u8")[:2]
    # Keyed twice, so that no stream is another one shifted.
    return _splitmix64_mix(_splitmix64_mix(counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + first) ^ second)


def keyed_uniform(counters: Indices, *key: int) -> NDArray[np.float64]:
    """For each counter a number of [0, 1)."""
    return (keyed_uint64(counters, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rank_row_range(n_rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """A contiguous slice of the rows; where the ranks do not divide them, some get one more."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be from 0 to world={world_size} less 1")
    return n_rows * rank // world_size, n_rows * (rank + 1) // world_size


def _hash_key(*key: int) -> bytes:
    return blake2b(",".join(map(str, key)).encode(), digest_size=8 * _N_ROUNDS).digest()


def _splitmix64_mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit in moves half the bits out."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
