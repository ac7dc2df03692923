"""`qkv models`: shipped models, local runs and model folders."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.config import GPTConfig
from qkv.cost import count_parameters
from qkv.errors import InputError
from qkv.zoo import read_model_card, shipped_model_folders
from tests.cli.answers import assert_only_error

HERE = Path(__file__).parent
"""A folder without models."""
SIZES = {"vocab_size": 101, "context_length": 32, "d_model": 8, "n_heads": 2, "n_layers": 3}
RUN = """
import sys
from qkv.cli import main
sys.argv = ["qkv", "models", *{options}]
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert not {{"torch", "numpy", "tokenizers", "safetensors"}} & set(sys.modules)
"""


def run(*options):
    code = RUN.format(options=list(options))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE).stdout


def test_the_table_does_not_import_torch_and_fits_a_terminal():
    header, *lines = run().splitlines()
    assert header.split()[:5] == ["NAME", "COMMAND", "PARAMETERS", "ON", "DISK"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(shipped_model_folders())
    assert any("stories    generate   12,219,984" in line for line in lines)
    assert any(line.endswith(" bits per byte (TinyStories test)") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.fixture
def local_models(tmp_path):
    """A run with two checkpoints, a model folder, an invalid model folder, and other files."""
    for step in (10, 20):
        (checkpoint := tmp_path / "run" / "checkpoints" / f"step-000000{step}").mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps({"family": "gpt", **SIZES}))
        (checkpoint / "model.safetensors").write_bytes(bytes(13 * step))
        (checkpoint / "progress.json").write_text(json.dumps({"step": step, "best_loss": 2.34567, "best_step": 10}))
    for name, family in (("folder", "bert"), ("odd", "brett")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"family": family, **SIZES}))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    shutil.copytree(tmp_path / "run", tmp_path / "tuned")
    result = {"scores": {"f1_macro": 0.81234, "mcc": 0.5}, "n_evaluation": 1013, "best_step": 10}
    (tmp_path / "tuned" / "result.json").write_text(json.dumps(result))
    (tmp_path / "texts").mkdir()
    (tmp_path / "book.txt").write_text("x")
    return tmp_path


def test_local_models_are_listed_after_the_shipped_ones(local_models):
    entries = map(json.loads, run(str(local_models), "--json").splitlines())
    models = {Path(entry["name"]).name: entry for entry in entries}
    assert list(models) == [*shipped_model_folders(), "folder", "odd", "run", "tuned"]
    run_entry = models["run"]
    assert (run_entry["task"], run_entry["bytes"]) == ("generate", 260)
    assert "20 steps" in run_entry["summary"]
    ((name, score),) = run_entry["scores"].items()
    assert ("validation loss" in name, "step 10" in name, score) == (True, True, 2.3457)
    ((name, score),) = models["tuned"]["scores"].items()
    assert (name.startswith("f1 macro on 1,013 texts"), "step 10" in name, score) == (True, True, 0.8123)
    assert run_entry["parameters"] == count_parameters(GPTConfig(**SIZES)).total
    assert models["folder"]["task"] == "embed"
    assert "'brett'" in models["odd"]["summary"]


def test_a_missing_folder_is_reported(command):
    assert_only_error(command("models", "nowhere"), "nowhere: ")


def test_json_has_one_object_per_model():
    models = {model["name"]: model for model in map(json.loads, run("--json").splitlines())}
    assert models.keys() == shipped_model_folders().keys()
    assert models["stories"]["scores"]["bits per byte (TinyStories test)"] <= 0.52
    assert models["stories"]["bytes"] == read_model_card(shipped_model_folders()["stories"]).n_bytes


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("# no header", "card.md: .*---"),
        ("---\ntask: x\n", "card.md: .*---"),
        ("---\ntask: x\nsummary: y\n---\n", "card.md: .*parameters"),
        ("---\ntask: x\nsummary: y\nlicence: z\nparameters: many\n---\n", "card.md: .*many"),
    ],
)
def test_a_card_with_an_invalid_header_is_rejected(header, message, tmp_path):
    (tmp_path / "card.md").write_text(header)
    with pytest.raises(InputError, match=message):
        read_model_card(tmp_path)
