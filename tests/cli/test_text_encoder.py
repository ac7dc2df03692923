"""`qkv fill`, `classify`, `embed`, `similar` and `evaluate --labeled`: one output line per input line, and errors."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from qkv.config import SentenceEmbedding
from qkv.tasks import TextEncoder, load_as
from qkv.weights.save import save_hf
from tests.cli.answers import assert_only_error
from tests.tasks.small_bert import CONTEXT, NAMES, save_bert
from tests.tasks.small_gpt import save_task, small_gpt
from tests.weights.small_berts import random_bert

LINES = ["The cat sat on the mat", "", "the dog", "El niño comió una manzana", "x", "Zwölf 😀", "and the dog sat"]
LONG = "the cat " * 40


@pytest.fixture
def command(command):
    return partial(command, stdin=b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def task(folder):
    return load_as(TextEncoder, folder)


def test_fill_prints_the_filled_text_and_the_predictions_of_each_mask(command, folder, task):
    masked = ["The [MASK] sat on the [MASK]", "a [MASK]"]
    answer = command("fill", folder, *masked, "-n", 3)
    expected = task.fill_mask(masked, n=3)
    lines = answer.out.splitlines()
    assert answer.status == 0
    for line, filled in zip(lines, expected, strict=True):
        text, *masks = line.split("\t")
        assert text == filled.text
        assert [mask.split("  ") for mask in masks] == [
            [f"{prediction.token} {prediction.probability:.4f}" for prediction in predictions]
            for predictions in filled.predictions
        ]


def test_fill_as_json_has_ids_and_probabilities(command, folder, task):
    result = json.loads(command("fill", folder, "--json", stdin=b"a [MASK]\n").out)
    (expected,) = task.fill_mask(["a [MASK]"])
    assert (result["text"], result["filled"]) == ("a [MASK]", expected.text)
    assert [prediction["id"] for prediction in result["masks"][0]] == [
        prediction.id for prediction in expected.predictions[0]
    ]


def test_classify_keeps_the_order_of_lines(command, folder, task, monkeypatch):
    monkeypatch.setattr("qkv.cli.options.TEXTS_PER_BATCH", 3)
    lines = [*LINES, "the cat\tsat", "\tx"]
    answer = command("classify", folder, stdin="\n".join(lines).encode())
    texts = [tuple(line.split("\t")) if "\t" in line else line for line in lines]
    columns = [f"{result.labels[0]}\t{result.probabilities[result.labels[0]]:.4f}" for result in task.classify(texts)]
    expected = [f"{column}\t{line}" if line else "" for column, line in zip(columns, lines, strict=True)]
    assert answer.out.splitlines() == expected
    results = [json.loads(line) for line in command("classify", folder, *lines, "--json").out.splitlines()]
    assert [tuple(text) if isinstance(text := result["text"], list) else text for result in results] == texts
    assert all(tuple(result["probabilities"]) == NAMES for result in results if result["text"])
    assert {"text": ""} in results


def test_classify_prints_several_labels_or_a_value(command, tmp_path):
    several = save_bert(tmp_path / "several", problem_type="multi-label")
    texts = [*filter(None, LINES)]
    lines = command("classify", several, *texts).out.splitlines()
    for line, text, answer in zip(lines, texts, load_as(TextEncoder, several).classify(texts), strict=True):
        probabilities = ",".join(f"{answer.probabilities[label]:.4f}" for label in answer.labels)
        assert line.split("\t") == [",".join(answer.labels), probabilities, text]
    number = save_bert(tmp_path / "number", class_names=None, n_classes=1)
    (expected,) = load_as(TextEncoder, number).classify(["the dog"])
    assert command("classify", number, "the dog").out == f"{expected.value:.4f}\tthe dog\n"
    assert json.loads(command("classify", number, "the dog", "--json").out)["value"] == pytest.approx(expected.value)


def test_next_sentence_prints_the_probability_of_a_pair(command, folder, task):
    expected = task.next_sentence_probability([("the cat", "sat")])[0]
    assert command("classify", folder, "the cat\tsat", "--next-sentence").out == f"{expected:.4f}\tthe cat\tsat\n"
    result = json.loads(command("classify", folder, "the cat\tsat", "--next-sentence", "--json").out)
    assert result == {"text": ["the cat", "sat"], "next_sentence_probability": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("options", "settings"),
    [([], {}), (["--pooling", "cls"], {"pooling": "cls"}), (["--no-normalize"], {"normalize": False})],
)
def test_embed_saves_one_row_per_line(command, folder, task, tmp_path, monkeypatch, options, settings):
    monkeypatch.setattr("qkv.cli.options.TEXTS_PER_BATCH", 2)
    answer = command("embed", folder, "--out", tmp_path / "x.npy", *options, stdin="\n".join(LINES).encode())
    saved_table = np.load(tmp_path / "x.npy")
    assert answer.out == ""
    assert all(value in answer.err for value in (f"{len(LINES)} vectors", "12", str(tmp_path / "x.npy"), "1 blank"))
    assert saved_table.dtype == np.float32
    expected = task.embed(LINES, **settings).numpy()
    expected[LINES.index("")] = np.nan
    np.testing.assert_allclose(saved_table, expected, atol=1e-5)


def test_embed_prints_vectors_by_default(command, folder, task):
    lines = command("embed", folder, *LINES[:3]).out.splitlines()
    assert lines.pop(1) == ""
    printed = np.array([[float(number) for number in line.split()] for line in lines])
    np.testing.assert_allclose(printed, task.embed(LINES[:3:2]).numpy(), atol=1e-5)
    result = json.loads(command("embed", folder, "the dog", "--json").out)
    np.testing.assert_allclose(result["vector"], task.embed(["the dog"])[0].numpy(), atol=1e-6)


def test_similar_prints_cosine_line_number_and_line(command, folder, task, tmp_path):
    (tmp_path / "among.txt").write_text("\n".join(LINES), encoding="utf-8")
    rows = [line.split("\t") for line in command(
        "similar", folder, "the dog", "x", "--among", tmp_path / "among.txt", "-n", 2
    ).out.splitlines()]  # fmt: skip
    assert [rows[0], rows[2]] == [["the dog", "1.0000", "3", "the dog"], ["x", "1.0000", "5", "x"]]
    query, cosine, number, text = rows[3]
    assert cosine == f"{torch.cosine_similarity(task.embed([query]), task.embed([text])).item():.4f}"
    assert text == LINES[int(number) - 1]
    result = json.loads(command("similar", folder, "x", "--among", tmp_path / "among.txt", "-n", 1, "--json").out)
    assert result == {"query": "x", "matches": [{"cosine": pytest.approx(1), "line": 5, "text": "x"}]}


def test_similar_reports_a_model_that_was_not_trained_to_compare_texts(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\nx\n")
    trained = save_bert(tmp_path / "trained", sentence_embedding=SentenceEmbedding(normalize=True))
    for model, is_reported in ((folder, True), (trained, False)):
        answer = command("similar", model, "x", "--among", tmp_path / "among.txt")
        assert answer.status == 0, answer.err
        assert (f"qkv: {model}: " in answer.err) == is_reported


def test_lines_without_a_mask_are_printed_unchanged_and_reported(command, folder, task, monkeypatch):
    monkeypatch.setattr("qkv.cli.options.TEXTS_PER_BATCH", 2)
    answer = command("fill", folder, "-n", 1, stdin=b"a [MASK]\na cat\n\n \nthe [MASK]\n")
    lines = answer.out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        task.fill_mask(["a [MASK]"])[0].text, "a cat", "", " ", task.fill_mask(["the [MASK]"])[0].text
    ]  # fmt: skip
    assert all(part in answer.err for part in ("1 of 5", "[MASK]", "text 2"))
    assert len(answer.err.splitlines()) == 1
    result = json.loads(command("fill", folder, "a cat", "--json").out)
    assert result == {"text": "a cat", "filled": "a cat", "masks": []}


def test_line_breaks_in_a_text_are_escaped(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\n")
    for arguments in (["classify", folder], ["fill", folder], ["similar", folder, "--among", tmp_path / "among.txt"]):
        (line,) = command(*arguments, "the cat\r\n[MASK]").out.splitlines()
        assert "the cat\\r\\n" in line


def test_a_blank_query_has_no_matches(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\nx\n")
    arguments = ["similar", folder, "--among", tmp_path / "among.txt", "-n", 1]
    assert [line.split("\t")[0] for line in command(*arguments, stdin=b"x\n\nthe dog\n").out.split("\n")] == [
        "x", "", "the dog", ""
    ]  # fmt: skip
    assert json.loads(command(*arguments, "", "--json").out) == {"query": "", "matches": []}


def test_long_texts_are_rejected_or_truncated(command, folder, monkeypatch):
    monkeypatch.setattr("qkv.cli.options.TEXTS_PER_BATCH", 1)
    answer = command("classify", folder, "x", LONG, LONG)
    assert (answer.status, len(answer.out.splitlines())) == (2, 1)
    assert answer.err.startswith("qkv: error: ")
    assert all(part in answer.err for part in ("text 2", "82 tokens", str(CONTEXT), "--truncate"))
    answer = command("classify", folder, "x", LONG, LONG, "--truncate")
    assert (answer.status, len(answer.out.splitlines())) == (0, 3)
    assert all(part in answer.err for part in ("2 of 3", f"{CONTEXT} tokens"))


def test_a_line_of_a_megabyte_is_rejected_or_truncated(command, folder):
    line = b"the cat sat " * 90_000
    assert_only_error(command("embed", folder, stdin=line), "text 1", "270,002 tokens", CONTEXT, "--truncate")
    assert command("embed", folder, "--truncate", stdin=line).status == 0


def test_invalid_input_is_reported_in_one_line(command, folder, tmp_path):
    bare = save_bert(tmp_path / "bare", masked_lm_head=False, next_sentence_head=False, class_names=None)
    gpt = save_task(small_gpt(), tmp_path / "gpt")
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    x, missing = tmp_path / "x.txt", tmp_path / "nowhere" / "x.npy"
    for arguments, stdin, parts in [
        (["fill", folder], b"", ["standard input"]),
        (["fill", folder], "x [MASK]\ncafé".encode("latin-1"), ["standard input: line 2: ", "byte 12 (0xE9)"]),
        (["embed", folder], b"a\0b", ["standard input: ", "byte 1 ", "NUL"]),
        (["classify", folder, "a\tb\tc"], b"", ["text 1", "3 columns", "2"]),
        (["classify", bare, "a"], b"", [bare, "classification head"]),
        (["classify", bare, "a\tb", "--next-sentence"], b"", [bare, "next-sentence head"]),
        (["classify", folder, "a", "--next-sentence"], b"", ["text 1", "pair"]),
        (["fill", bare, "[MASK]"], b"", [bare, "head"]),
        (["fill", gpt, "[MASK]"], b"", [f"{gpt}: ", "GPT", "BERT"]),
        (["generate", folder, "x"], b"", [f"{folder}: ", "BERT", "GPT"]),
        (["embed", folder, "x", "--out", x], b"", ["--out", "x.txt: ", ".npy"]),
        (["embed", folder, "x", "--out", missing], b"", ["--out", missing.parent]),
        (["embed", folder, "x", "--out", "x.npy", "--json"], b"", ["--out", "--json"]),
        (["similar", folder, "x", "--among", tmp_path / "no.txt"], b"", ["--among", "no.txt: "]),
        (["similar", folder, "x", "--among", tmp_path], b"", [f"--among {tmp_path}: "]),
        (["similar", folder, "x", "--among", tmp_path / "blank.txt"], b"", ["blank.txt: "]),
        (["similar", folder, "x", "--among", tmp_path / "empty.txt"], b"", ["empty.txt: "]),
    ]:
        assert_only_error(command(*arguments, stdin=stdin), *parts)


@pytest.mark.parametrize("name", ["fill", "classify", "embed", "similar"])
def test_help_has_an_example(command, name):
    assert f"qkv {name} " in command(name, "--help").out.split("Examples:")[1]


def test_a_head_missing_from_the_weights_is_reported(command, tmp_path):
    save_hf(random_bert(masked_lm_head=True), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("BertForMaskedLM", "BertForPreTraining"))
    answer = command("fill", tmp_path / "model", "the [MASK]")
    assert (answer.status, answer.out.count("\n")) == (0, 1)
    assert answer.err.startswith(f"qkv: {tmp_path / 'model'}: ")
    assert "next-sentence head" in answer.err


def test_evaluate_computes_the_metrics_of_a_classifier(command, folder, task, tmp_path):
    texts = [line for line in LINES if line]
    rows = [f"{text}\t{answer.labels[0]}" for text, answer in zip(texts, task.classify(texts), strict=True)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    result = json.loads(command("evaluate", folder, "--labeled", tmp_path / "rows.tsv", "--json").out)
    assert (result["rows"], result["accuracy"]) == (6, 1.0)
    metrics, classes = command("evaluate", folder, "--labeled", tmp_path / "rows.tsv").out.split("\n\n")
    assert metrics.splitlines()[0].split() == ["rows", "6"]
    assert [line.split()[0] for line in classes.splitlines()] == ["class", *NAMES]
    assert_only_error(
        command("evaluate", folder, "--labeled", tmp_path / "rows.tsv", "--limit", 3), "--limit", "--labeled"
    )


def test_f1_of_two_classes_is_labeled_with_the_class(command, tmp_path):
    two = save_bert(tmp_path / "two", class_names=("bad", "good"))
    (tmp_path / "rows.tsv").write_text("text\tlabel\nthe cat\tgood\nx\tbad\n")
    output = command("evaluate", two, "--labeled", tmp_path / "rows.tsv").out
    assert "\nf1 of good " in output
    assert "\nf1_macro " in output
