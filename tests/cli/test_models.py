"""`qkv models`: what is shipped, at once."""

import json
import subprocess
import sys

import pytest

from qkv.errors import InputError
from qkv.zoo import read_card, shipped

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
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_table_has_a_line_a_model_and_needs_no_torch():
    header, *lines = run().splitlines()
    assert header.split() == ["NAME", "TASK", "PARAMETERS", "ON", "DISK", "WHAT", "IT", "DOES"]
    assert [line.split()[0] for line in lines] == list(shipped())
    assert any("12,219,984" in line and "bits a byte" in line for line in lines)


def test_json_has_an_object_a_model():
    models = {model["name"]: model for model in map(json.loads, run("--json").splitlines())}
    assert models.keys() == shipped().keys()
    assert models["stories"]["scores"]["bits a byte (TinyStories test)"] <= 0.52
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
