"""Who may import whom: the contracts of pyproject.toml, and that none of them has a hole."""

import subprocess
import sys
import tomllib

import pytest

from tests.architecture.paths import ROOT, SOURCE

FOLDERS = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# Kept as contracts from the day that both sides exist: import-linter refuses names that are not there.
NEVER = [
    ("models", "qkv.text"),
    ("data", "qkv.nn"),
    ("config", "torch"),
    ("cost", "torch"),
    ("text", "torch"),
]


def test_the_import_contracts_hold():
    lint_imports = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    answer = subprocess.run(lint_imports, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{len(CONTRACTS)} kept" in answer.stdout


@pytest.mark.parametrize(("importer", "imported"), NEVER)
def test_what_must_never_be_imported_has_a_contract(importer, imported):
    name = imported.removeprefix("qkv.")
    if importer not in FOLDERS or (name != imported and name not in FOLDERS):
        pytest.skip("not built yet")
    forbidden = [contract for contract in CONTRACTS if contract["type"] == "forbidden"]
    assert any(
        f"qkv.{importer}" in contract["source_modules"] and imported in contract["forbidden_modules"]
        for contract in forbidden
    )
