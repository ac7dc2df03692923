"""Which of several processes is still there: each gives a sign every second, and looks for the others'."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

EVERY = 1.0
SILENCE = 15.0
"""Seconds after which a process counts as gone: it was killed where nobody saw it, is frozen, or its machine is off."""


SAID = "said"
"""How many wanted to say why all of them end."""


class Heartbeat:
    """A thread that calls `lost` when another process has been silent for too long; with why, if none said it yet."""

    def __init__(self, store: Store, *, rank: int, world: int, lost: Callable[[str], None]) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"beat/{other}" for other in range(world)]
        self._lost = lost
        self._is_over = threading.Event()
        self._was_said = False
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        store.set(self._keys[rank], "0")
        store.wait(self._keys, timedelta(minutes=5))
        self._thread.start()

    @classmethod
    def connected(
        cls, host: str, port: int, *, part: str, rank: int, world: int, lost: Callable[[str], None]
    ) -> "Heartbeat":
        """By a connection of its own: on a shared one it would wait behind what others wait for."""
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return cls(PrefixStore(part, store), rank=rank, world=world, lost=lost)

    def is_first(self) -> bool:
        """True for the one process that asks first; where nobody can be asked any more, for the second of all."""
        try:
            return self._store.add(SAID, 1) == 1
        except DistError:
            return self._rank == 1 and not self._was_said

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(5 * EVERY)

    def _end(self, why: str) -> None:
        self._lost(why if self.is_first() else "")

    def _watch(self) -> None:
        n, seen = 0, {key: (b"", time.monotonic()) for key in self._keys}
        while not self._is_over.wait(EVERY):
            n += 1
            try:
                self._store.set(self._keys[self._rank], str(n))
                beats = self._store.multi_get(self._keys)
                self._was_said = self._store.add(SAID, 0) > 0
            except (DistError, RuntimeError):
                if not self._is_over.is_set():
                    self._end("the process that the others meet at is gone")
                return
            now = time.monotonic()
            for number, (key, beat) in enumerate(zip(self._keys, beats, strict=True)):
                if seen[key][0] != beat:
                    seen[key] = (beat, now)
                elif now - seen[key][1] > SILENCE:
                    self._end(f"rank {number} has given no sign for {SILENCE:.0f} s")
                    return
