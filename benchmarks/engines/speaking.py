"""How an engine speaks with the runner: one JSON object a line, questions on stdin, answers on stdout.

`{"do": "describe", …}` asks for versions, `check` for an output that other engines must give too, `time` for
seconds. The rest of a question is the work to be done.
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

Question = dict[str, Any]
Answer = dict[str, Any]


class MissingPeerError(Exception):
    """A peer is not on this machine; the message says what it needs."""


def serve(handlers: Mapping[str, Callable[[Question], Answer]]) -> None:
    """Answer until the runner closes stdin. What fails is an answer, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a peer prints must not be taken for an answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = handlers[question.pop("do")](question)
        except MissingPeerError as missing:
            answer = {"missing": str(missing)}
        except Exception as error:  # noqa: BLE001 - the runner must hear of anything that goes wrong
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Stopwatch:
    """Wall-clock and CPU seconds (all threads of this process) since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


def scratch_folder() -> Path:
    """One that goes away with this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
