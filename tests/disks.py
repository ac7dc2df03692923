"""A disk that refuses, at whichever operation the test names."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from safetensors import SafetensorError

from qkv.weights import atomic_folder


class Refusing:
    """Counts what is asked of the disk, and answers the n-th with an error; where it stays so, all after it too."""

    def __init__(self, at: int | None, number: int, *, stays: bool = False) -> None:
        self.at = at
        self.number = number
        self.stays = stays
        self.names: list[str] = []

    def ask(self, name: str) -> bool:
        self.names.append(name)
        if self.at is None:
            return False
        return len(self.names) >= self.at if self.stays else len(self.names) == self.at

    def wrapped(self, name, real):
        def wrapper(*arguments, **named):
            is_reading = name == "open" and not set("wax+") & set(str(arguments[1] if len(arguments) > 1 else "r"))
            if not is_reading and self.ask(name):
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **named)

        return wrapper

    def save_file(self, tensors, path, metadata=None, *, real=atomic_folder.save_file):
        if self.ask("save_file"):
            path.write_bytes(b"half")
            raise SafetensorError(
                f"Error while serializing: I/O error: {os.strerror(self.number)} (os error {self.number})"
            )
        real(tensors, path, metadata=metadata)


@contextmanager
def refusing(at: int | None = None, number: int = errno.ENOSPC, *, stays: bool = False) -> Iterator[Refusing]:
    """With `at` None nothing is refused; the names say what was asked."""
    disk = Refusing(at, number, stays=stays)
    calls = [(os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "chmod"), (os, "truncate"), (io, "open")]
    patches = [mock.patch.object(module, name, disk.wrapped(name, getattr(module, name))) for module, name in calls]
    patches.append(mock.patch.object(atomic_folder, "save_file", disk.save_file))
    for patch in patches:
        patch.start()
    try:
        yield disk
    finally:
        for patch in patches:
            patch.stop()
