"""`qkv doctor`: what is here, what is missing, in words and as JSON."""

import importlib.metadata
import json
import re
import tomllib

import torch

from qkv.cli.doctor import EXTRAS
from qkv.training import recipe_selection
from tests.architecture.paths import ROOT


def test_each_finding_is_a_line_and_a_missing_package_comes_with_the_command(command, monkeypatch):
    known = importlib.metadata.version

    def version(package):
        if package == "fastapi":
            raise importlib.metadata.PackageNotFoundError(package)
        return known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    answer = command("doctor")
    assert answer.status == 0
    lines = {re.split(r"  +", line)[0]: line for line in answer.out.splitlines()}
    assert str(torch.__version__) in lines["torch"]
    assert re.search(r"without fastapi +the page: qkv explore: pip install 'qkv\[serve\]'", lines["[serve]"])
    assert "pip" not in lines["[plot]"]
    assert max(map(len, lines.values())) <= 100


def test_json_has_the_rate_of_matrix_products(command, monkeypatch):
    monkeypatch.setattr(recipe_selection, "measure_matmul_flops", lambda _device: 1234e9)
    said = json.loads(command("doctor", "--json").out)
    assert said["matrix products"]["found"] == "1,234 GFLOP/s"
    assert said["qkv"]["found"]


def test_how_long_threads_wait_for_each_other_is_told(command, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "71")
    assert json.loads(command("doctor", "--json").out)["its threads"]["found"] == "GOMP_SPINCOUNT=71"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert json.loads(command("doctor", "--json").out)["its threads"]["found"] == "OMP_WAIT_POLICY=passive"


def test_the_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = {extra: set(packages) for extra, (packages, _) in EXTRAS.items()}
    assert told == {extra: set(declared[extra]) for extra in declared if extra not in ("dev", "docs", "all")}
