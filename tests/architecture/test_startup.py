"""`import qkv` and `qkv --help` stay light."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "pydantic", "tokenizers", "safetensors", "jaxtyping", "matplotlib"}

IMPORT = "import qkv"
HELP = """
import contextlib, io
from qkv.cli import main
sys.argv = ["qkv", *{arguments}]
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main()
assert {expected!r} in shown.getvalue(), shown.getvalue()
"""


def modules_after(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        IMPORT,
        "import qkv\ndir(qkv)",
        HELP.format(arguments=["--help"], expected="Usage: qkv"),
        HELP.format(arguments=["lesson", "--help"], expected="Usage: qkv lesson"),
        HELP.format(arguments=["--version"], expected="qkv "),
        HELP.format(arguments=["lesson"], expected="soft-dictionary"),
    ],
    ids=["import", "dir", "help", "lesson-help", "version", "lesson-list"],
)
def test_nothing_heavy_is_imported(code):
    assert modules_after(code) & HEAVY == set()


def test_help_is_plain_text_without_rich():
    # rich would triple the time; a command's own help may take it, for typer escapes "[default: 0]" with it.
    assert "rich" not in modules_after(HELP.format(arguments=["--help"], expected="Usage: qkv"))


def test_the_check_sees_a_heavy_import():
    assert "pydantic" in modules_after("import qkv\nqkv.GPTConfig")
