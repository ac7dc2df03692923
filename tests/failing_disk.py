"""Simulate disk errors at a chosen operation."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from safetensors import SafetensorError

from qkv.weights import checkpoint_folder


class FailingDisk:
    """Records disk operations and fails at the n-th one, or from the n-th one on with `keeps_failing`."""

    def __init__(self, fail_at: int | None, error_number: int, *, keeps_failing: bool = False) -> None:
        self.fail_at = fail_at
        self.error_number = error_number
        self.keeps_failing = keeps_failing
        self.operations: list[str] = []

    def should_fail(self, name: str) -> bool:
        self.operations.append(name)
        if self.fail_at is None:
            return False
        return len(self.operations) >= self.fail_at if self.keeps_failing else len(self.operations) == self.fail_at

    def wrap(self, name, real):
        def wrapper(*arguments, **named):
            is_reading = name == "open" and not set("wax+") & set(str(arguments[1] if len(arguments) > 1 else "r"))
            if not is_reading and self.should_fail(name):
                raise OSError(self.error_number, os.strerror(self.error_number))
            return real(*arguments, **named)

        return wrapper

    def save_file(self, tensors, path, metadata=None, *, real=checkpoint_folder.save_file):
        if self.should_fail("save_file"):
            path.write_bytes(b"half")
            raise SafetensorError(
                f"Error while serializing: I/O error: {os.strerror(self.error_number)} (os error {self.error_number})"
            )
        real(tensors, path, metadata=metadata)


@contextmanager
def failing_disk(
    fail_at: int | None = None, error_number: int = errno.ENOSPC, *, keeps_failing: bool = False
) -> Iterator[FailingDisk]:
    """Patch disk operations to fail at number `fail_at`. With None, operations are only recorded."""
    disk = FailingDisk(fail_at, error_number, keeps_failing=keeps_failing)
    calls = [(os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "chmod"), (os, "truncate"), (io, "open")]
    patches = [mock.patch.object(module, name, disk.wrap(name, getattr(module, name))) for module, name in calls]
    patches.append(mock.patch.object(checkpoint_folder, "save_file", disk.save_file))
    for patch in patches:
        patch.start()
    try:
        yield disk
    finally:
        for patch in patches:
            patch.stop()
