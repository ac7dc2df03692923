"""Protocol between engines and the benchmark runner, which exchange one JSON object per line on stdin and stdout.

The command `describe` returns versions, `check` returns an output that must agree with the outputs of the other
engines, and `time` returns seconds. The other fields of a request describe the workload.
"""

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EngineRequest = dict[str, Any]
EngineResponse = dict[str, Any]


class MissingPeerError(Exception):
    """Raised if a peer is not installed. The message explains how to install the peer."""


def serve(handlers: Mapping[str, Callable[[EngineRequest], EngineResponse]]) -> None:
    """Handle requests until the runner closes stdin. Errors are sent as responses."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Text that a peer prints must not be mistaken for a response.
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            response = handlers[request.pop("command")](request)
        except MissingPeerError as missing:
            response = {"missing": str(missing)}
        except Exception as error:  # noqa: BLE001 - all errors are reported to the runner
            response = {"error": f"{type(error).__name__}: {error}"}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


class ElapsedTimer:
    """A timer that measures wall-clock and CPU seconds (over all threads of this process) since it was created."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def elapsed(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


def temporary_folder() -> Path:
    """Create a folder that is deleted when the process exits."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
