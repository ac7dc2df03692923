"""Group sequences of similar length into batches, which need little padding.

Packing several texts into one row would need even less padding, but would compute attention scores between texts only
to mask them out. On a CPU, batches of similar length are faster (`python -m benchmarks embed` measures both methods).
"""

from collections.abc import Iterator, Sequence


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
