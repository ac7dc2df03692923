"""Batches of sequences of similar length, which need little padding.

Packing several texts into one row would further reduce padding, but would compute scores that are masked out. On a CPU,
batches of similar length are faster (`python -m benchmarks embed` measures both).
"""

from collections.abc import Iterator, Sequence


def batch_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of `lengths`, sorted by length, in batches of at most `max_tokens` tokens including padding.

    A sequence that exceeds the limit forms a batch by itself.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
