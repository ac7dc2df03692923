"""Batches of sequences of similar length, which need little padding.

Packing several texts into one row would reduce padding further, but computes scores that its mask discards. On a CPU,
batches of similar length are faster (`python -m benchmarks embed` measures both).
"""

from collections.abc import Iterator, Sequence


def batch_by_length(lengths: Sequence[int], tokens_at_once: int) -> Iterator[list[int]]:
    """Yield the indices of `lengths`, sorted by length, in batches of at most `tokens_at_once` tokens including padding.

    A sequence that exceeds the limit forms a batch by itself.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > tokens_at_once:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
