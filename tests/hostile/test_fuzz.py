"""Coverage-guided fuzzing of file readers, if atheris is installed."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("reader", ["sentencepiece", "labeled", "manifest", "settings", "gguf", "llama2c"])
def test_fuzzed_bytes_are_read_or_raise_a_qkv_error(reader, tmp_path):
    pytest.importorskip("atheris", reason="atheris is not installed (pip install atheris)")
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), reader]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
