"""Draw examples in random order, group them by length, and prepare batches in background threads.

Random numbers and permutations are stateless, pure functions of a key. A permutation of [0, n) is a Feistel network
over the bits of n with cycle walking: values of n or more are permuted again. The domain has fewer than 2n values, so
at most two rounds are needed on average. Nothing is stored, and only the requested values are computed.

Batches of similar length need little padding. Packing several texts into one row would need even less padding, but
would compute attention scores between texts only to mask them out. On a CPU, batches of similar length are faster
(`python -m benchmarks embed` measures both methods).
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ConfigError

Indices = NDArray[np.int64]

_N_ROUNDS = 8
_MAX_VALUES = 1 << 62


T = TypeVar("T")


class Permutation:
    """A pseudorandom permutation of [0, n) that is determined by a key of integers."""

    def __init__(self, n: int, *key: int) -> None:
        if not 1 <= n <= _MAX_VALUES:
            raise ConfigError(f"the size of a permutation must be between 1 and 2^62, got n={n}")
        self.n = n
        n_bits = (n - 1).bit_length()
        self._low = np.uint64(n_bits // 2)
        self._low_mask = np.uint64((1 << (n_bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (n_bits - n_bits // 2)) - 1)
        self._keys = np.frombuffer(_hash_key(*key), dtype="<u8").astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Return the value to which the permutation maps each index."""
        if indices.size and not 0 <= indices.min() <= indices.max() < self.n:
            raise ConfigError(
                f"indices from {indices.min()} to {indices.max()} are out of range for a permutation of {self.n} values"
            )
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
    """Return a pseudorandom integer in [0, n) that is determined by the key."""
    return int.from_bytes(_hash_key(*key)[:16], "little") % n


def keyed_uint64(counters: Indices, *key: int) -> NDArray[np.uint64]:
    """Return 64 pseudorandom bits for each counter, taken from the key's splitmix64 stream."""
    first, second = np.frombuffer(_hash_key(*key), dtype="<u8")[:2]
    # Using two keys prevents one stream from being a shifted copy of another.
    return _splitmix64_mix(_splitmix64_mix(counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + first) ^ second)


def keyed_uniform(counters: Indices, *key: int) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for each counter, determined by the key."""
    return (keyed_uint64(counters, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rank_row_range(n_rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range [start, stop) of rows for a rank. Rows are distributed among ranks as evenly as possible."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be between 0 and world_size - 1, got rank={rank} and world_size={world_size}")
    return n_rows * rank // world_size, n_rows * (rank + 1) // world_size


def _hash_key(*key: int) -> bytes:
    return blake2b(",".join(map(str, key)).encode(), digest_size=8 * _N_ROUNDS).digest()


def _splitmix64_mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the splitmix64 finalizer (Steele, Lea and Flood, 2014).

    On average, flipping one input bit flips half of the output bits.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Sort sequences by length, and yield batches of their indices.

    A batch contains at most `max_tokens` tokens, including padding. A sequence that exceeds this limit forms a batch by
    itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def prefetch(
    batch: Callable[[int], T], start: int, *, stop: int | None = None, n_ahead: int = 2, n_workers: int = 1
) -> Generator[T, None, None]:
    """Yield batch(start), batch(start + 1), … in order, with worker threads computing the batches in advance.

    If a worker raises an exception, the exception is re-raised when the affected batch is requested. Each batch is a
    pure function of its number, so the result does not depend on the number of workers.
    """
    waiting: deque[Future[T]] = deque()
    number = start
    with ThreadPoolExecutor(n_workers, thread_name_prefix="prefetch") as pool:
        try:
            while True:
                while len(waiting) < n_ahead + 1 and (stop is None or number < stop):
                    waiting.append(pool.submit(batch, number))
                    number += 1
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
