"""Exchange heartbeats between the processes of a distributed run to detect processes that have died or hang."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 15.0
"""Time without a heartbeat after which a process is considered lost. A lost process was killed or hangs, or its machine
is down."""
_ERROR_REPORTS_KEY = "error_reports"
"""Store key for the number of processes that have asked to report the error. Only the first one reports it."""


class Heartbeat:
    """A background thread that calls `on_peer_lost` if another process has sent no heartbeat for too long.

    The argument of `on_peer_lost` is the reason, or an empty string if another process has already reported the error.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, on_peer_lost: Callable[[str], None]) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"heartbeat/{other}" for other in range(world_size)]
        self._on_peer_lost = on_peer_lost
        self._stopped = threading.Event()
        self._is_reported = False
        self._thread = threading.Thread(target=self._beat_and_monitor, name="heartbeat", daemon=True)
        store.set(self._keys[rank], "0")
        store.wait(self._keys, timedelta(minutes=5))
        self._thread.start()

    @classmethod
    def connect(
        cls, host: str, port: int, *, prefix: str, rank: int, world_size: int, on_peer_lost: Callable[[str], None]
    ) -> "Heartbeat":
        """Create a heartbeat with its own connection to the store.

        On a shared connection, heartbeats would block behind other pending operations.
        """
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return cls(PrefixStore(prefix, store), rank=rank, world_size=world_size, on_peer_lost=on_peer_lost)

    def claim_error_report(self) -> bool:
        """Return True for the first process that calls this method, and False for all others.

        If the store is unreachable, rank 0 (which hosts the store) has exited, and rank 1 reports the error.
        """
        try:
            return self._store.add(_ERROR_REPORTS_KEY, 1) == 1
        except DistError:
            return self._rank == 1 and not self._is_reported

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(5 * INTERVAL_SECONDS)

    def _report_loss(self, reason: str) -> None:
        self._on_peer_lost(reason if self.claim_error_report() else "")

    def _beat_and_monitor(self) -> None:
        n_sent, last_change = 0, {key: (b"", time.monotonic()) for key in self._keys}
        while not self._stopped.wait(INTERVAL_SECONDS):
            n_sent += 1
            try:
                self._store.set(self._keys[self._rank], str(n_sent))
                beats = self._store.multi_get(self._keys)
                self._is_reported = self._store.add(_ERROR_REPORTS_KEY, 0) > 0
            except (DistError, RuntimeError):
                if not self._stopped.is_set():
                    self._report_loss("lost the connection to the process that hosts the store")
                return
            now = time.monotonic()
            for rank, (key, beat) in enumerate(zip(self._keys, beats, strict=True)):
                if last_change[key][0] != beat:
                    last_change[key] = (beat, now)
                elif now - last_change[key][1] > TIMEOUT_SECONDS:
                    self._report_loss(f"rank {rank} has sent no heartbeat for {TIMEOUT_SECONDS:.0f} s")
                    return
