"""Runs in child processes that tests can kill, forked from a server process that has already imported torch."""

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

WRITE_EVENTS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"}


class FileOperations:
    """Counts all file operations of Python and kills the process right before the n-th.

    Weights are written by native code, so an additional kill point simulates a half-written weights file.
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
        from qkv.training.checkpoint import RunFolder
        from qkv.weights import checkpoint_folder

        sync, save_file = os.fsync, checkpoint_folder.save_file

        def counting_fsync(handle):
            self.tick("fsync")
            sync(handle)

        def counting_save_file(tensors, path, metadata=None):
            save_file(tensors, path, metadata=metadata)
            self.tick("half of the weights", lambda: os.truncate(path, path.stat().st_size // 2))
            self.tick("weights")

        os.fsync, checkpoint_folder.save_file = counting_fsync, counting_save_file
        for name in ("save", "delete_old_checkpoints"):
            setattr(RunFolder, name, self._mark_as_saving(getattr(RunFolder, name)))
        sys.addaudithook(self._audit)

    def _mark_as_saving(self, method: Callable[..., None]) -> Callable[..., None]:
        def wrapper(run, *arguments, **keywords):
            self.is_saving = True
            method(run, *arguments, **keywords)
            self.is_saving = False

        return wrapper

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in WRITE_EVENTS or is_write:
            self.tick(event)


def resume_counting_operations(folder: str, kill_at: int | None, report: str) -> None:
    """Resume a run, train it to the end, and write the names of its file operations to `report`."""
    import torch

    from tests.training.runs import resume_to_end

    torch.set_num_threads(1)
    operations = FileOperations(kill_at)
    operations.install()
    resume_to_end(Path(folder))
    names = list(operations.names)
    Path(report).write_text(json.dumps(names))


def run_command(folder: str, arguments: list[str]) -> None:
    """Run `qkv` with these arguments, with stdout and stderr redirected to files in `folder`."""
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


def run_command_with_file_limit(n_bytes: int, folder: str, arguments: list[str]) -> None:
    """Like `run_command`, with a limit of the operating system on the size of files."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    run_command(folder, arguments)


def start_process(target: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def run_process(target: Callable[..., None], *arguments: object) -> int | None:
    process = start_process(target, *arguments)
    process.join(240)
    return process.exitcode
