"""`qkv models`: what is shipped, at once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.config import GPTConfig
from qkv.cost import count_parameters
from qkv.errors import InputError
from qkv.zoo import read_card, shipped

HERE = Path(__file__).parent
"""Where no models lie."""
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


def test_the_table_needs_no_torch_and_fits_a_terminal():
    head, *lines = run().splitlines()
    assert head.split()[:5] == ["NAME", "COMMAND", "PARAMETERS", "ON", "DISK"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(shipped())
    assert any("stories    generate   12,219,984" in line for line in lines)
    assert any(line.endswith(" bits per byte (TinyStories test)") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.fixture
def own(tmp_path):
    """A run of two checkpoints, a model's folder, one that is broken, and what is no model."""
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


def test_models_of_ones_own_are_listed_after_the_shipped(own):
    found = {Path(one["name"]).name: one for one in map(json.loads, run(str(own), "--json").splitlines())}
    assert list(found) == [*shipped(), "folder", "odd", "run", "tuned"]
    run_found = found["run"]
    assert (run_found["task"], run_found["bytes"], run_found["summary"]) == (
        "generate",
        260,
        "a run of yours, 20 steps long",
    )
    assert run_found["scores"] == {"validation loss, the best, at step 10": 2.3457}
    assert found["tuned"]["scores"] == {"f1 macro on 1,013 texts, the best, at step 10": 0.8123}
    assert run_found["parameters"] == count_parameters(GPTConfig(**SIZES)).total
    assert found["folder"]["task"] == "embed"
    assert found["odd"]["summary"].startswith("cannot be read: ")


def test_a_folder_that_is_not_there_is_named(command):
    answer = command("models", "nowhere")
    assert (answer.status, answer.err) == (2, "qkv: error: nowhere: is no folder\n")


def test_json_has_an_object_a_model():
    models = {model["name"]: model for model in map(json.loads, run("--json").splitlines())}
    assert models.keys() == shipped().keys()
    assert models["stories"]["scores"]["bits per byte (TinyStories test)"] <= 0.52
    assert models["stories"]["bytes"] == read_card(shipped()["stories"]).n_bytes


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("# no head", "does not open with lines between two lines ---"),
        ("---\ntask: x\n", "does not open with lines between two lines ---"),
        ("---\ntask: x\nsummary: y\n---\n", "has no line 'parameters: …' at its head"),
        ("---\ntask: x\nsummary: y\nlicence: z\nparameters: many\n---\n", "invalid literal"),
    ],
)
def test_a_card_without_its_head_is_refused(head, message, tmp_path):
    (tmp_path / "card.md").write_text(head)
    with pytest.raises(InputError, match=message):
        read_card(tmp_path)
