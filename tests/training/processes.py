"""Runs in processes of their own, to be killed: forked from one that has torch loaded already."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "matplotlib.figure", "qkv.cli", "tests.training.runs"])

WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"}


class FileOperations:
    """Counts every change of the disk that Python is about to make, and kills the process at the n-th.

    For weights, which are written outside Python, the kill also comes when half of the file is there.
    """

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.names: list[str] = []
        self.is_saving = False

    def tick(self, name: str, before_kill: Callable[[], None] = lambda: None) -> None:
        self.names.append(f"save: {name}" if self.is_saving else name)
        if len(self.names) == self.kill_at:
            before_kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        from qkv.training.run_folder import RunFolder
        from qkv.weights import folder

        sync, save_file = os.fsync, folder.save_file

        def counted_sync(handle):
            self.tick("fsync")
            sync(handle)

        def counted_save(tensors, path, metadata=None):
            save_file(tensors, path, metadata=metadata)
            self.tick("half of the weights", lambda: os.truncate(path, path.stat().st_size // 2))
            self.tick("weights")

        os.fsync, folder.save_file = counted_sync, counted_save
        for name in ("save", "rotate"):
            setattr(RunFolder, name, self._marked(getattr(RunFolder, name)))
        sys.addaudithook(self._hear)

    def _marked(self, method: Callable[..., None]) -> Callable[..., None]:
        def marked(run, *arguments, **named):
            self.is_saving = True
            method(run, *arguments, **named)
            self.is_saving = False

        return marked

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        is_written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in WRITES or is_written:
            self.tick(event)


def go_on_counted(folder: str, kill_at: int | None, report: str) -> None:
    """Resume a run and train it to the end; `report` gets the names of the operations."""
    import torch

    from tests.training.runs import go_on

    torch.set_num_threads(1)
    operations = FileOperations(kill_at)
    operations.install()
    go_on(Path(folder))
    names = list(operations.names)
    Path(report).write_text(json.dumps(names))


def command(folder: str, arguments: list[str]) -> None:
    """`qkv` with these arguments; what it prints goes into files, its exit code is the process's."""
    import torch

    from qkv.cli import main

    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = ["qkv", *arguments]
    with (
        (Path(folder) / "out").open("w", buffering=1) as out,
        (Path(folder) / "err").open("w", buffering=1) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        main()


def command_within(n_bytes: int, folder: str, arguments: list[str]) -> None:
    """As `command`, where the system itself refuses a file of more bytes, in the middle of writing it."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    command(folder, arguments)


def start(target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def run_to_end(target: Callable[..., None], *arguments: object) -> int | None:
    process = start(target, *arguments)
    process.join(240)
    return process.exitcode
