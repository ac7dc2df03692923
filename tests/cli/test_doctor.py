"""`qkv doctor`: one row per check, as a table and as JSON."""

import importlib.metadata
import json
import re
import tomllib

import torch

from qkv.cli.doctor import EXTRAS
from qkv.training import recipe_selection
from tests.architecture.paths import ROOT


def test_a_missing_package_is_listed_with_the_command_to_install_it(command, monkeypatch):
    installed_version = importlib.metadata.version

    def version(package):
        if package == "fastapi":
            raise importlib.metadata.PackageNotFoundError(package)
        return installed_version(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    answer = command("doctor")
    assert answer.status == 0
    lines = {re.split(r"  +", line)[0]: line for line in answer.out.splitlines()}
    assert str(torch.__version__) in lines["torch"]
    assert re.search(r"missing fastapi +.*qkv explore.*pip install 'qkv\[serve\]'", lines["[serve]"])
    assert "pip" not in lines["[plot]"]
    assert max(map(len, lines.values())) <= 100


def test_json_has_the_matmul_rate(command, monkeypatch):
    monkeypatch.setattr(recipe_selection, "measure_matmul_flops", lambda _device: 1234e9)
    result = json.loads(command("doctor", "--json").out)
    assert result["matmul rate"]["value"] == "1,234 GFLOP/s"
    assert result["qkv"]["value"]


def test_the_openmp_wait_setting_is_reported(command, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "71")
    assert json.loads(command("doctor", "--json").out)["OpenMP wait"]["value"] == "GOMP_SPINCOUNT=71"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert json.loads(command("doctor", "--json").out)["OpenMP wait"]["value"] == "OMP_WAIT_POLICY=passive"


def test_the_extras_are_those_of_pyproject():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {extra: set(packages) for extra, (packages, _) in EXTRAS.items()}
    assert listed == {extra: set(declared[extra]) for extra in declared if extra not in ("dev", "docs", "all")}
