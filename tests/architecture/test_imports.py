"""The import contracts of pyproject.toml."""

import subprocess
import sys
import tomllib

import pytest

from tests.architecture.paths import ROOT, SOURCE

FOLDERS = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

FORBIDDEN_IMPORTS = [
    ("models", "qkv.text"),
    ("data", "qkv.nn"),
    ("config", "torch"),
    ("cost", "torch"),
    ("text", "torch"),
]


def test_the_import_contracts_are_kept():
    lint_imports = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    answer = subprocess.run(lint_imports, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{len(CONTRACTS)} kept" in answer.stdout


@pytest.mark.parametrize(("importer", "imported"), FORBIDDEN_IMPORTS)
def test_every_forbidden_import_has_a_contract(importer, imported):
    name = imported.removeprefix("qkv.")
    if importer not in FOLDERS or (name != imported and name not in FOLDERS):
        pytest.skip("the package does not exist")
    forbidden = [contract for contract in CONTRACTS if contract["type"] == "forbidden"]
    assert any(
        f"qkv.{importer}" in contract["source_modules"] and imported in contract["forbidden_modules"]
        for contract in forbidden
    )
