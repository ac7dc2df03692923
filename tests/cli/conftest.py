"""Fixtures that run a command in this process."""

import io
import sys
from types import SimpleNamespace

import pytest

from qkv.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs `qkv` with the given arguments and returns its status, out and err.

    `stdin` is the content of standard input, which is unchanged by default.
    """

    def call(*arguments, stdin: bytes | str | None = None):
        monkeypatch.setattr(sys, "argv", ["qkv", *map(str, arguments)])
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as stop:
            main()
        return SimpleNamespace(status=stop.value.code, **capsys.readouterr()._asdict())

    return call
