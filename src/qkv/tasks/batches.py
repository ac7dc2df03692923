"""Which sequences go through a model together: those of like length, so that little of a batch is padding.

Packing several texts into one row wastes less on padding and more on scores that its mask forbids: on a CPU
batches of like length are faster (`python -m benchmarks embed` measures both).
"""

from collections.abc import Iterator, Sequence


def batch_by_length(lengths: Sequence[int], tokens_at_once: int) -> Iterator[list[int]]:
    """Each place of `lengths` once, from short to long, in batches of at most so many tokens, padding counted.

    A sequence that is longer than that is a batch of its own.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > tokens_at_once:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
