"""`import qkv` and `qkv --help` do not import heavy packages."""

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
with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
    main()
assert {expected!r} in output.getvalue(), output.getvalue()
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
def test_importing_qkv_and_the_help_import_nothing_heavy(code):
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
def test_commands_without_computation_import_nothing_heavy(code):
    # Pydantic is allowed, because typer uses it to parse arguments.
    assert modules_after(code) & HEAVY == set()


def test_heavy_imports_are_detected():
    assert "pydantic" in modules_after("import qkv\nqkv.GPTConfig")


WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "71"}, "71"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["default", "spin-count", "wait-policy"],
)
def test_torch_threads_of_a_command_spin_briefly_by_default(settings, expected):
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    answer = subprocess.run(
        [sys.executable, "-m", "qkv.cli", "generate", "no-model", "x"], capture_output=True, text=True, check=False,
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **settings},
    )  # fmt: skip
    if (match := re.search(r"GOMP_SPINCOUNT = '(\d+)'", answer.stderr)) is None:
        pytest.skip("torch does not use GNU OpenMP")
    assert match[1] == expected
