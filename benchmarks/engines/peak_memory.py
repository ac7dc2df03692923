"""Measure by how many MiB two training steps increase peak memory.

Run `python -m benchmarks.engines.peak_memory CHUNK`, where CHUNK is 0 for the unchunked loss.
"""

import resource
import sys

from benchmarks.engines.next_token_workload import Workload
from benchmarks.engines.train_qkv import build

WORK = Workload(
    n_layers=4,
    n_heads=4,
    d_model=256,
    vocab_size=50257,
    context_length=256,
    bias=True,
    batch=8,
    length=256,
    threads=1,
)


def main(chunk: int) -> None:
    before = _peak()
    built, batches = build(WORK, {"loss_chunk_size": chunk} if chunk else {}), WORK.batches()
    losses = [built.read(built.step(*batch)) for batch in batches[:2]]
    sys.stdout.write(f"{_peak() - before:.1f} {losses[1]:.6f}\n")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
