"""The command as a user runs it, without a process of its own."""

import io
import sys
from types import SimpleNamespace

import pytest

from qkv.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """Arguments in; status, out and err back. `stdin`: what standard input holds; None leaves it as it is."""

    def call(*arguments, stdin: bytes | str | None = None):
        monkeypatch.setattr(sys, "argv", ["qkv", *map(str, arguments)])
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as stop:
            main()
        return SimpleNamespace(status=stop.value.code, **capsys.readouterr()._asdict())

    return call
