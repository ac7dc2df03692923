"""`qkv verify`: a table or JSON, and exit status 1 if a check fails."""

import json

import pytest

from qkv.weights import checkpoint_folder
from qkv.weights.save import save_hf
from tests.cli.answers import assert_only_error
from tests.tasks.test_verification import too_large
from tests.weights.loaded_models import random_model


@pytest.fixture
def model(tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "model")
    return tmp_path / "model"


def test_the_table_has_one_row_per_check_with_a_reason_at_the_end(command, model):
    answer = command("verify", model, "--quick")
    assert (answer.status, answer.err) == (0, "")
    header, *lines = answer.out.splitlines()
    assert header.split() == ["CHECK", "COMPARED", "DIFFERENCE", "LIMIT", "SECONDS", "RESULT"]
    assert len(lines) == 18
    assert lines[1].startswith("cached ")
    assert lines[1].endswith("  passed")
    assert "not checked: " in lines[-1]
    assert "--quick" in lines[-1]


def test_a_failed_check_has_exit_status_1(command, model, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_folder, "dequantize_int8_matrices", too_large)
    (tmp_path / "texts").write_text("The cat sat on the mat.\n\nThen both slept.\n")
    answer = command("verify", model, "--quick", "--json", "--text", tmp_path / "texts")
    assert (answer.status, answer.err) == (1, "")
    result = json.loads(answer.out)
    assert (result["model"], result["passed"]) == (str(model), False)
    failed = [check for check in result["checks"] if check["verdict"] == "failed"]
    assert [check["check"] for check in failed] == ["int8 weights"]
    assert failed[0]["difference"] > failed[0]["tolerance"] == 0.501


def test_at_least_two_texts_are_required(command, model, tmp_path):
    (tmp_path / "texts").write_text("The cat sat on the mat.\n")
    assert_only_error(command("verify", model, "--text", tmp_path / "texts"), "1 of 1", "2")
