"""Run commands in separate processes with limited time and memory."""

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_CPU_SECONDS = 120
"""Limit of CPU time, to detect endless loops. Even a slow machine only needs a few seconds."""
MAX_WALL_SECONDS = 600
"""Limit of wall-clock time, to detect commands that wait without computing."""
MAX_EXTRA_MEMORY = 2**30
"""Limit of memory in addition to that of the imported modules, in bytes."""


@dataclass(frozen=True)
class CommandResult:
    """Exit code, output and CPU time of a command."""

    code: int
    """Exit code, or 128 plus the signal number (SIGXCPU or SIGALRM if a time limit was exceeded)."""
    out: str
    err: str
    seconds: float

    def find_fault(self, words: Sequence[str]) -> str | None:
        """Return what is wrong with the error report for an invalid file, or None.

        A correct report is a single line that contains all `words`.
        """
        lines = [line for line in self.err.splitlines() if line.startswith("qkv: error: ")]
        if self.code in (128 + signal.SIGXCPU, 128 + signal.SIGALRM):
            return f"exceeded {MAX_CPU_SECONDS} s of CPU time or {MAX_WALL_SECONDS} s of wall-clock time"
        if "Traceback" in self.err or "panicked" in self.err:
            return "a traceback: " + self.err[-400:]
        expected = 1 if "no update was applied" in self.err else 2  # 1 if a training run stopped at an invalid value
        if self.code != expected or len(lines) != 1 or self.err.splitlines()[-1] != lines[0]:
            return f"exit {self.code}: {self.err[-400:]!r}"
        if len(lines[0]) > 3000:
            return f"a line of {len(lines[0])} characters"
        missing = [word for word in words if word not in lines[0]]
        return f"{missing[0]!r} is missing in: {lines[0]}" if missing else None


def run_commands(commands: Sequence[tuple[Path, Sequence[str]]]) -> list[CommandResult]:
    """Run qkv with the given (working directory, arguments), one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "qkv.cli", "tests.hostile.preload"])
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(
        target=_run_forked, args=(sender, [(str(folder), list(arguments)) for folder, arguments in commands])
    )
    worker.start()
    sender.close()
    try:
        return [receiver.recv() for _ in commands]
    finally:
        worker.join()


def _run_forked(results, commands: list[tuple[str, list[str]]]) -> None:
    for folder, arguments in commands:
        child = os.fork()
        if child == 0:
            _run_in_child(folder, arguments)
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        outputs = [Path(folder, name).read_text(errors="replace") for name in (".out", ".err")]
        results.send(CommandResult(code if code >= 0 else 128 - code, *outputs, usage.ru_utime + usage.ru_stime))


def _run_in_child(folder: str, arguments: list[str]) -> None:
    import torch

    from qkv.cli import main

    os.chdir(folder)
    for name, number in ((".out", 1), (".err", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    sys.argv = ["qkv", *arguments]
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_EXTRA_MEMORY,) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 1))
    signal.alarm(MAX_WALL_SECONDS)
    code = 1
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:  # noqa: BLE001 - including Rust panics
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
