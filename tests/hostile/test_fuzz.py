"""Coverage-guided fuzzing of our own readers, where atheris is installed."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.parametrize("reader", ["sentencepiece", "labelled", "manifest", "settings", "gguf", "llama2c"])
def test_bytes_found_by_coverage_are_read_or_refused_in_one_line(reader, tmp_path):
    pytest.importorskip("atheris", reason="atheris is not installed: pip install atheris")
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), reader]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
