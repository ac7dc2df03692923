"""`qkv verify`: a table or JSON on standard output, status 1 where a check failed."""

import json

import pytest

from qkv.weights import models
from qkv.weights.save import save_hf
from tests.tasks.test_verification import too_large
from tests.weights.loaded_models import random_model


@pytest.fixture
def model(tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "model")
    return tmp_path / "model"


def test_a_table_has_a_line_a_check_with_reasons_at_its_end(command, model):
    answer = command("verify", model, "--quick")
    assert (answer.status, answer.err) == (0, "")
    head, *lines = answer.out.splitlines()
    assert head.split() == ["CHECK", "COMPARED", "DIFFERENCE", "LIMIT", "SECONDS", "RESULT"]
    assert len(lines) == 16
    assert lines[1].startswith("cached ")
    assert lines[1].endswith("  passed")
    assert lines[-1].endswith("not checked: it takes long, and --quick was asked for")


def test_a_failed_check_is_status_1_and_told_in_json(command, model, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "from_int8", too_large)
    (tmp_path / "texts").write_text("The cat sat on the mat.\n\nThen both slept.\n")
    answer = command("verify", model, "--quick", "--json", "--text", tmp_path / "texts")
    assert (answer.status, answer.err) == (1, "")
    found = json.loads(answer.out)
    assert (found["model"], found["passed"]) == (str(model), False)
    failed = [check for check in found["checks"] if check["verdict"] == "failed"]
    assert [check["check"] for check in failed] == ["int8 weights"]
    assert failed[0]["difference"] > failed[0]["tolerance"] == 0.501


def test_one_text_is_too_few(command, model, tmp_path):
    (tmp_path / "texts").write_text("The cat sat on the mat.\n")
    answer = command("verify", model, "--text", tmp_path / "texts")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == "qkv: error: 1 of 1 texts have 2 tokens or more; 2 texts are needed\n"
