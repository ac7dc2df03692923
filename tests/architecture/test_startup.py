"""`import qkv` and `qkv --help` stay light."""

import os
import re
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


WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "71"}, "71"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["said-nothing", "said-turns", "said-a-policy"],
)
def test_torchs_threads_spin_a_short_while_unless_the_user_said_otherwise(given, expected):
    kept = {name: value for name, value in os.environ.items() if name not in WAITS}
    answer = subprocess.run(
        [sys.executable, "-c", "import qkv.tensors"], capture_output=True, text=True, check=True,
        env={**kept, "OMP_DISPLAY_ENV": "verbose", **given},
    )  # fmt: skip
    if (told := re.search(r"GOMP_SPINCOUNT = '(\d+)'", answer.stderr)) is None:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert told[1] == expected
