"""Run engines in separate processes and send requests to them."""

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
    """Raised if an installed engine fails."""


class MissingEngineError(Exception):
    """Raised if an engine is not installed."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine to benchmark, with its name in the tables and the module that runs it."""

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    """Whether the engine is part of qkv. Speedups are computed relative to the engines of qkv."""
    root: Path = ROOT
    """Checkout of qkv whose code the engine runs."""
    tolerance: float | None = None
    """Allowed difference between outputs for an engine in lower precision. If None, the plan's tolerance applies."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", self.module]


class EngineProcess:
    """The process of a running engine. Requests are synchronous, so two engines never compute at the same time."""

    def __init__(self, command: list[str], *, threads: int, root: Path = ROOT) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        python_path = os.pathsep.join(filter(None, (str(root / "src"), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": python_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def send_request(self, command: str, **payload: Any) -> dict[str, Any]:  # noqa: ANN401 - a request is any JSON
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # If the engine has exited, the missing response below raises an error.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **payload}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"exited with status {self._process.wait()}: {self._last_error_line()}")
        response = json.loads(line)
        if "missing" in response:
            raise MissingEngineError(response["missing"])
        if "error" in response:
            raise EngineError(response["error"])
        return response

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
        return lines[-1] if lines else "no error output"
