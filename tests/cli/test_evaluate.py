"""`qkv evaluate`: bits a byte as its definition says, in batches, in text or JSON."""

import json
import math
from functools import partial

import pytest

from qkv.tasks import load
from qkv.weights.models import Loaded
from qkv.weights.save import Numbers, save_hf
from tests.tasks.small_gpt import saved, small_task

DOCUMENTS = ["The cat sat on the mat.", "El niño comió 😀", "x", "and the dog slept\n" * 9]


@pytest.fixture
def command(command):
    return partial(command, "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_task(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "held-out.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    return path


def test_sums_over_documents_are_divided_once(command, folder, text):
    """An average of averages would weigh the short document as much as the long."""
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


def test_a_limit_takes_the_first_documents(command, folder, text):
    answer = command(folder, "--text", text, "--limit", 2)
    rows = dict(line.split() for line in answer.out.splitlines())
    assert rows["documents"] == "2"
    assert rows["bytes"] == str(len("".join(DOCUMENTS[:2]).encode()))
    assert list(rows) == ["documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte"]


def test_what_is_to_be_told_of_the_weights_is_told(command, text, tmp_path):
    task = small_task()
    save_hf(Loaded(task.model, task.tokenizer), tmp_path / "half", numbers=Numbers.F16)
    answer = command(tmp_path / "half", "--text", text)
    assert "half: its weights are float16; they are computed with in float32\n" in answer.err


def test_several_files_are_one_text(command, folder, text, tmp_path):
    (tmp_path / "more.txt").write_text("one more")
    more = ["--text", tmp_path / "more.txt"]
    assert json.loads(command(folder, "--text", text, *more, "--json").out)["documents"] == 5


def test_mistakes_are_one_line_and_status_2(command, folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for arguments, line in [
        ([folder, "--text", tmp_path / "nowhere.txt"], "nowhere.txt: there is no such file or folder"),
        ([folder, "--text", tmp_path / "empty.txt"], "empty.txt: is empty"),
    ]:
        answer = command(*arguments)
        assert (answer.status, answer.out) == (2, "")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1


def test_help_has_an_example(command):
    assert "qkv evaluate " in command("--help").out.split("Examples:")[1]


@pytest.fixture
def tales(tmp_path):
    path = tmp_path / "tales.txt"
    tale = "The old man opened the door and went out. It was a cold night. He looked at the stars. He came back soon."
    review = "This film is boring. The actors are bad. The story makes no sense at all. I would not watch it again."
    path.write_text("\n<|endoftext|>\n".join([" ".join([tale] * 5), " ".join([review] * 5)] * 4))
    return path


def test_a_bert_is_judged_by_its_two_games_and_the_same_each_time(command, tales):
    first, again = (command("bert", "--text", tales, "--json") for _ in range(2))
    result = json.loads(first.out)
    assert first.out == again.out
    assert result["hidden_words"] > 50
    assert 0.3 < result["masked_word_accuracy"] < 1.0
    assert 0.5 < result["next_sentence_accuracy"] <= 1.0
    assert "masked_word_accuracy " in command("bert", "--text", tales).out


def test_what_a_bert_cannot_be_asked_is_one_line(command, tales):
    for arguments, line in [
        (["bert", "--text", tales, "--limit", "3"], "--limit is for a GPT"),
        (["sentiment", "--text", tales], "sentiment: guesses no hidden words; it can embed, classify"),
    ]:
        answer = command(*arguments)
        assert (answer.status, answer.out) == (2, "")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1
