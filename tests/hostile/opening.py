"""A file opened by the command that a user would use, in a process of its own with little time and memory."""

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

SECONDS = 120
"""Of computing. A guard against a file that is never done with: a slow machine needs a few seconds."""
MOST_WAITING = 600
"""Seconds of the clock, for what waits and does not compute."""
MOST_MEMORY = 2**30
"""Beyond what the command has when it begins, which is torch itself."""


@dataclass(frozen=True)
class Outcome:
    code: int
    """128 and more: ended by that signal; SIGXCPU or SIGALRM: it took too long."""
    out: str
    err: str
    seconds: float

    def fault(self, words: Sequence[str]) -> str | None:
        """What is wrong with how a bad file was refused; `words`: what the line must name."""
        lines = [line for line in self.err.splitlines() if line.startswith("qkv: error: ")]
        if self.code in (128 + signal.SIGXCPU, 128 + signal.SIGALRM):
            return f"no end after {SECONDS} s of computing, or {MOST_WAITING} s of waiting"
        if "Traceback" in self.err or "panicked" in self.err:
            return "a traceback: " + self.err[-400:]
        expected = 1 if "; no update was made, " in self.err else 2  # a run that had begun, and stopped in time
        if self.code != expected or len(lines) != 1 or self.err.splitlines()[-1] != lines[0]:
            return f"exit {self.code}: {self.err[-400:]!r}"
        if len(lines[0]) > 3000:
            return f"a line of {len(lines[0])} characters"
        missing = [word for word in words if word not in lines[0]]
        return f"{missing[0]!r} is not named: {lines[0]}" if missing else None


def open_all(commands: Sequence[tuple[Path, Sequence[str]]]) -> list[Outcome]:
    """Each (folder to be in, arguments of qkv), one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "qkv.cli", "tests.hostile.preloaded"])
    mine, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(theirs, [(str(folder), list(given)) for folder, given in commands]))
    worker.start()
    theirs.close()
    try:
        return [mine.recv() for _ in commands]
    finally:
        worker.join()


def _work(answers, commands: list[tuple[str, list[str]]]) -> None:
    for folder, arguments in commands:
        child = os.fork()
        if child == 0:
            _become(folder, arguments)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        said = [Path(folder, name).read_text(errors="replace") for name in (".out", ".err")]
        answers.send(Outcome(code if code >= 0 else 128 - code, *said, used.ru_utime + used.ru_stime))


def _become(folder: str, arguments: list[str]) -> None:
    import torch

    from qkv.cli import main

    os.chdir(folder)
    for name, number in ((".out", 1), (".err", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    sys.argv = ["qkv", *arguments]
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_MEMORY,) * 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    signal.alarm(MOST_WAITING)
    code = 1
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:  # noqa: BLE001 - a panic too
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
