"""`qkv evaluate --text`: metrics of a GPT and of a BERT."""

import json
import math
import re
from functools import partial

import pytest

from qkv.tasks import load
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType, save_hf
from tests.cli.answers import assert_only_error
from tests.tasks.small_gpt import save_task, small_gpt

DOCUMENTS = ["The cat sat on the mat.", "El niño comió 😀", "x", "and the dog slept\n" * 9]


@pytest.fixture
def command(command):
    return partial(command, "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(small_gpt(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "held-out.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    return path


def test_sums_over_documents_are_divided_once(command, folder, text):
    """An average of averages would give short documents the same weight as long ones."""
    result = json.loads(command(folder, "--text", text, "--json").out)
    scores = [load(folder).score(document) for document in DOCUMENTS]
    total = sum(score.loss_sum for score in scores)
    n_bytes = sum(len(document.strip().encode()) for document in DOCUMENTS)
    assert result["documents"] == 4
    assert result["bytes"] == n_bytes
    assert result["tokens"] == sum(score.n_targets for score in scores)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-6)
    assert result["loss"] == pytest.approx(total / result["tokens"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-6)


def test_a_limit_selects_the_first_documents(command, folder, text):
    answer = command(folder, "--text", text, "--limit", 2)
    rows = dict(line.split() for line in answer.out.splitlines())
    assert rows["documents"] == "2"
    assert rows["bytes"] == str(len("".join(DOCUMENTS[:2]).encode()))
    assert list(rows) == ["documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte"]


def test_remarks_about_the_weights_are_printed(command, text, tmp_path):
    task = small_gpt()
    save_hf(ModelBundle(task.model, task.tokenizer), tmp_path / "half", dtype=StorageDType.F16)
    answer = command(tmp_path / "half", "--text", text)
    assert re.search(r"half: .*float16.*float32", answer.err)


def test_several_files_are_evaluated_together(command, folder, text, tmp_path):
    (tmp_path / "more.txt").write_text("one more")
    more = ["--text", tmp_path / "more.txt"]
    assert json.loads(command(folder, "--text", text, *more, "--json").out)["documents"] == 5


def test_invalid_files_are_reported_in_one_line(command, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for arguments, part in [
        ([folder, "--text", tmp_path / "nowhere.txt"], "nowhere.txt: "),
        ([folder, "--text", tmp_path / "empty.txt"], "empty.txt: "),
    ]:
        assert_only_error(command(*arguments), part)


def test_help_has_an_example(command):
    assert "qkv evaluate " in command("--help").out.split("Examples:")[1]


@pytest.fixture
def tales(tmp_path):
    path = tmp_path / "tales.txt"
    tale = "The old man opened the door and went out. It was a cold night. He looked at the stars. He came back soon."
    review = "This film is boring. The actors are bad. The story makes no sense at all. I would not watch it again."
    path.write_text("\n<|endoftext|>\n".join([" ".join([tale] * 5), " ".join([review] * 5)] * 4))
    return path


def test_the_metrics_of_a_bert_are_reproducible(command, tales):
    first, again = (command("bert", "--text", tales, "--json") for _ in range(2))
    result = json.loads(first.out)
    assert first.out == again.out
    assert result["masked_tokens"] > 50
    assert 0.3 < result["masked_lm_accuracy"] < 1.0
    assert 0.5 < result["next_sentence_accuracy"] <= 1.0
    assert "masked_lm_accuracy " in command("bert", "--text", tales).out


def test_unsupported_options_of_a_bert_are_reported_in_one_line(command, tales):
    for arguments, part in [
        (["bert", "--text", tales, "--limit", "3"], "--limit"),
        (["sentiment", "--text", tales], "sentiment: "),
    ]:
        assert_only_error(command(*arguments), part)
