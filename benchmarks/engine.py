"""An engine in a process of its own, as the runner sees it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent


class EngineError(Exception):
    """The engine is here but could not do what was asked."""


class MissingEngineError(Exception):
    """The engine is not on this machine."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What to start, and under which name its figures stand."""

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    """Counts as ours where ratios are taken."""
    tolerance: float | None = None
    """For an engine in lower precision; None: the plan's own."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", self.module]


class Running:
    """A started engine. Each question waits for its answer, so that never two engines work at once."""

    def __init__(self, command: list[str], *, threads: int) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with it
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, do: str, **work: Any) -> dict[str, Any]:  # noqa: ANN401 - a question is any JSON
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # An engine that has ended is noticed when it gives no answer.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **work}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"ended with status {self._process.wait()}: {self._last_error_line()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise MissingEngineError(answer["missing"])
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_error_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"
