"""`import qkv` and `qkv --help` stay light."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "jaxtyping", "matplotlib", "rich"}

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
    [IMPORT, "import qkv\ndir(qkv)", HELP.format(arguments=["--help"], expected="Usage: qkv")],
    ids=["import", "dir", "help"],
)
def test_the_front_door_imports_nothing_heavy(code):
    assert modules_after(code) & {*HEAVY, "pydantic"} == set()


@pytest.mark.parametrize(
    "code",
    [
        HELP.format(arguments=["--version"], expected="qkv "),
        HELP.format(arguments=["lesson", "--help"], expected="Usage: qkv lesson"),
        HELP.format(arguments=["lesson"], expected="soft-dictionary"),
    ],
    ids=["version", "lesson-help", "lesson-list"],
)
def test_a_command_that_computes_nothing_imports_nothing_heavy(code):
    # Not pydantic: typer reads a command's own arguments with it.
    assert modules_after(code) & HEAVY == set()


def test_the_check_sees_a_heavy_import():
    assert "pydantic" in modules_after("import qkv\nqkv.GPTConfig")
