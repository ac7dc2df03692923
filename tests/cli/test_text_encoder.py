"""`qkv fill`, `classify`, `embed`, `similar`: a line out for each line in, in order; a mistake is one line."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from qkv.config import SentenceEmbedding
from qkv.tasks import TextEncoder, load_as
from qkv.weights.save import save_hf
from tests.tasks.small_bert import CONTEXT, NAMES, saved_bert
from tests.tasks.small_gpt import saved, small_task
from tests.weights.encoders import random_bert

LINES = ["The cat sat on the mat", "", "the dog", "El niño comió una manzana", "x", "Zwölf 😀", "and the dog sat"]
LONG = "the cat " * 40
CUT = "--truncate (truncate=True) cuts it"


@pytest.fixture
def command(command):
    return partial(command, stdin=b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_bert(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def task(folder):
    return load_as(TextEncoder, folder)


def test_fill_prints_the_filled_text_and_the_guesses_of_each_mask(command, folder, task):
    masked = ["The [MASK] sat on the [MASK]", "a [MASK]"]
    answer = command("fill", folder, *masked, "-n", 3)
    expected = task.fill_mask(masked, n=3)
    lines = answer.out.splitlines()
    assert answer.status == 0
    for line, filled in zip(lines, expected, strict=True):
        text, *masks = line.split("\t")
        assert text == filled.text
        assert [mask.split("  ") for mask in masks] == [
            [f"{guess.token} {guess.probability:.4f}" for guess in guesses] for guesses in filled.predictions
        ]


def test_fill_as_json_has_ids_and_probabilities(command, folder, task):
    said = json.loads(command("fill", folder, "--json", stdin=b"a [MASK]\n").out)
    (expected,) = task.fill_mask(["a [MASK]"])
    assert (said["text"], said["filled"]) == ("a [MASK]", expected.text)
    assert [guess["id"] for guess in said["masks"][0]] == [guess.id for guess in expected.predictions[0]]


def test_classify_keeps_lines_and_order(command, folder, task, monkeypatch):
    monkeypatch.setattr("qkv.cli.text_inputs.LINES_AT_ONCE", 3)
    lines = [*LINES, "the cat\tsat", "\tx"]
    answer = command("classify", folder, stdin="\n".join(lines).encode())
    texts = [tuple(line.split("\t")) if "\t" in line else line for line in lines]
    said = [f"{a.labels[0]}\t{a.probabilities[a.labels[0]]:.4f}" for a in task.classify(texts)]
    assert answer.out.splitlines() == [f"{one}\t{line}" if line else "" for one, line in zip(said, lines, strict=True)]
    said = [json.loads(line) for line in command("classify", folder, *lines, "--json").out.splitlines()]
    assert [tuple(one["text"]) if isinstance(one["text"], list) else one["text"] for one in said] == texts
    assert all(tuple(one["probabilities"]) == NAMES for one in said if one["text"])
    assert {"text": ""} in said


def test_classify_several_labels_and_a_number(command, tmp_path):
    several = saved_bert(tmp_path / "several", problem_type="multi-label")
    texts = [*filter(None, LINES)]
    lines = command("classify", several, *texts).out.splitlines()
    for line, text, answer in zip(lines, texts, load_as(TextEncoder, several).classify(texts), strict=True):
        probabilities = ",".join(f"{answer.probabilities[label]:.4f}" for label in answer.labels)
        assert line.split("\t") == [",".join(answer.labels), probabilities, text]
    number = saved_bert(tmp_path / "number", class_names=None, n_classes=1)
    (expected,) = load_as(TextEncoder, number).classify(["the dog"])
    assert command("classify", number, "the dog").out == f"{expected.number:.4f}\tthe dog\n"
    assert json.loads(command("classify", number, "the dog", "--json").out)["number"] == pytest.approx(expected.number)


def test_what_follows_is_asked_of_pairs(command, folder, task):
    expected = task.next_sentence_probability([("the cat", "sat")])[0]
    assert command("classify", folder, "the cat\tsat", "--next-sentence").out == f"{expected:.4f}\tthe cat\tsat\n"
    said = json.loads(command("classify", folder, "the cat\tsat", "--next-sentence", "--json").out)
    assert said == {"text": ["the cat", "sat"], "follows": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("options", "settings"),
    [([], {}), (["--pooling", "cls"], {"pooling": "cls"}), (["--no-normalize"], {"normalize": False})],
)
def test_embed_saves_a_row_a_line(command, folder, task, tmp_path, monkeypatch, options, settings):
    monkeypatch.setattr("qkv.cli.text_inputs.LINES_AT_ONCE", 2)
    answer = command("embed", folder, "--out", tmp_path / "x.npy", *options, stdin="\n".join(LINES).encode())
    saved_table = np.load(tmp_path / "x.npy")
    said = f"qkv: {len(LINES)} vectors of width 12 in {tmp_path / 'x.npy'}; 1 of blank lines are NaN\n"
    assert (answer.out, answer.err) == ("", said)
    assert saved_table.dtype == np.float32
    expected = task.embed(LINES, **settings).numpy()
    expected[LINES.index("")] = np.nan
    np.testing.assert_allclose(saved_table, expected, atol=1e-5)


def test_embed_prints_where_no_file_is_named(command, folder, task):
    lines = command("embed", folder, *LINES[:3]).out.splitlines()
    assert lines.pop(1) == ""
    printed = np.array([[float(number) for number in line.split()] for line in lines])
    np.testing.assert_allclose(printed, task.embed(LINES[:3:2]).numpy(), atol=1e-5)
    said = json.loads(command("embed", folder, "the dog", "--json").out)
    np.testing.assert_allclose(said["vector"], task.embed(["the dog"])[0].numpy(), atol=1e-6)


def test_similar_gives_cosine_line_and_text(command, folder, task, tmp_path):
    (tmp_path / "among.txt").write_text("\n".join(LINES), encoding="utf-8")
    rows = [line.split("\t") for line in command(
        "similar", folder, "the dog", "x", "--among", tmp_path / "among.txt", "-n", 2
    ).out.splitlines()]  # fmt: skip
    assert [rows[0], rows[2]] == [["the dog", "1.0000", "3", "the dog"], ["x", "1.0000", "5", "x"]]
    query, cosine, number, text = rows[3]
    assert cosine == f"{torch.cosine_similarity(task.embed([query]), task.embed([text])).item():.4f}"
    assert text == LINES[int(number) - 1]
    said = json.loads(command("similar", folder, "x", "--among", tmp_path / "among.txt", "-n", 1, "--json").out)
    assert said == {"query": "x", "found": [{"cosine": pytest.approx(1), "line": 5, "text": "x"}]}


def test_similar_says_of_a_model_that_only_guesses_words_that_it_does_no_more(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\nx\n")
    trained = saved_bert(tmp_path / "trained", sentence_embedding=SentenceEmbedding(normalize=True))
    for model, is_said in ((folder, True), (trained, False)):
        answer = command("similar", model, "x", "--among", tmp_path / "among.txt")
        assert answer.status == 0, answer.err
        assert ("was not trained to compare texts" in answer.err) == is_said


def test_lines_that_ask_nothing_stay_in_their_place_and_are_told_of(command, folder, task, monkeypatch):
    monkeypatch.setattr("qkv.cli.text_inputs.LINES_AT_ONCE", 2)
    answer = command("fill", folder, "-n", 1, stdin=b"a [MASK]\na cat\n\n \nthe [MASK]\n")
    lines = answer.out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        task.fill_mask(["a [MASK]"])[0].text, "a cat", "", " ", task.fill_mask(["the [MASK]"])[0].text
    ]  # fmt: skip
    assert answer.err == "qkv: 1 of 5 texts have no [MASK] and stay as they are; the first: text 2\n"
    said = json.loads(command("fill", folder, "a cat", "--json").out)
    assert said == {"text": "a cat", "filled": "a cat", "masks": []}


def test_a_text_of_two_lines_has_one_line_of_answer(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\n")
    for asked in (["classify", folder], ["fill", folder], ["similar", folder, "--among", tmp_path / "among.txt"]):
        (line,) = command(*asked, "the cat\r\n[MASK]").out.splitlines()
        assert "the cat\\r\\n" in line


def test_a_blank_query_finds_nothing(command, folder, tmp_path):
    (tmp_path / "among.txt").write_text("the dog\nx\n")
    asked = ["similar", folder, "--among", tmp_path / "among.txt", "-n", 1]
    assert [line.split("\t")[0] for line in command(*asked, stdin=b"x\n\nthe dog\n").out.split("\n")] == [
        "x", "", "the dog", ""
    ]  # fmt: skip
    assert json.loads(command(*asked, "", "--json").out) == {"query": "", "found": []}


def test_what_is_too_long_is_cut_when_asked_and_that_is_said(command, folder, monkeypatch):
    monkeypatch.setattr("qkv.cli.text_inputs.LINES_AT_ONCE", 1)
    answer = command("classify", folder, "x", LONG, LONG)
    assert (answer.status, len(answer.out.splitlines())) == (2, 1)
    assert answer.err == f"qkv: error: text 2 has 82 tokens, the model takes {CONTEXT}: {CUT}\n"
    answer = command("classify", folder, "x", LONG, LONG, "--truncate")
    assert (answer.status, len(answer.out.splitlines())) == (0, 3)
    assert answer.err == f"qkv: 2 of 3 texts were cut at {CONTEXT} tokens\n"


def test_a_line_of_a_megabyte_is_cut_or_refused_in_one_line(command, folder):
    line = b"the cat sat " * 90_000
    answer = command("embed", folder, stdin=line)
    assert answer.err == f"qkv: error: text 1 has 270,002 tokens, the model takes {CONTEXT}: {CUT}\n"
    assert command("embed", folder, "--truncate", stdin=line).status == 0


def test_mistakes_are_one_line_and_status_2(command, folder, tmp_path):
    bare = saved_bert(tmp_path / "bare", masked_lm_head=False, next_sentence_head=False, class_names=None)
    gpt = saved(small_task(), tmp_path / "gpt")
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    x, missing = tmp_path / "x.txt", tmp_path / "nowhere" / "x.npy"
    for arguments, stdin, line in [
        (["fill", folder], b"", "standard input is empty, and no text was given"),
        (["fill", folder], "x [MASK]\ncafé".encode("latin-1"), "standard input: line 2: byte 12 (0xE9) is not UTF-8"),
        (["embed", folder], b"a\0b", "standard input: byte 1 is NUL"),
        (["classify", folder, "a\tb\tc"], b"", "text 1 has 3 columns; a pair has 2, with one tab between"),
        (["classify", bare, "a"], b"", f"{bare} has no classification head, so it cannot classify"),
        (["classify", bare, "a\tb", "--next-sentence"], b"", f"{bare} has no next-sentence head"),
        (["classify", folder, "a", "--next-sentence"], b"", "text 1 is one text; what follows is asked of a pair"),
        (["fill", bare, "[MASK]"], b"", f"{bare} has no masked-word head, so it cannot fill masks"),
        (["fill", gpt, "[MASK]"], b"", f"{gpt}: is a language model (GPT); a text encoder (BERT) is needed here"),
        (["generate", folder, "x"], b"", f"{folder}: is a text encoder (BERT); a language model (GPT) is needed"),
        (["embed", folder, "x", "--out", x], b"", "x.txt: the name must end in .npy"),
        (["embed", folder, "x", "--out", missing], b"", "there is no folder"),
        (["embed", folder, "x", "--out", "x.npy", "--json"], b"", "--out saves a table, --json prints: choose one"),
        (["similar", folder, "x", "--among", tmp_path / "no.txt"], b"", "no.txt: there is no such file"),
        (["similar", folder, "x", "--among", tmp_path], b"", f"--among {tmp_path}: is a folder, not a file"),
        (["similar", folder, "x", "--among", tmp_path / "blank.txt"], b"", "blank.txt: holds blank lines alone"),
        (["similar", folder, "x", "--among", tmp_path / "empty.txt"], b"", "empty.txt: is empty"),
    ]:
        answer = command(*arguments, stdin=stdin)
        assert (answer.status, answer.out) == (2, ""), arguments
        assert line in answer.err
        assert answer.err.startswith("qkv: error: ")
        assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("verb", ["fill", "classify", "embed", "similar"])
def test_help_has_an_example(command, verb):
    assert f"qkv {verb} " in command(verb, "--help").out.split("Examples:")[1]


def test_a_head_that_the_config_promises_and_the_weights_lack_is_said(command, tmp_path):
    save_hf(random_bert(masked_lm_head=True), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("BertForMaskedLM", "BertForPreTraining"))
    answer = command("fill", tmp_path / "model", "the [MASK]")
    assert (answer.status, answer.out.count("\n")) == (0, 1)
    assert answer.err.startswith(f"qkv: {tmp_path / 'model'}: the weights hold no next-sentence head (")


def test_evaluate_judges_a_classifier_by_labelled_texts(command, folder, task, tmp_path):
    texts = [line for line in LINES if line]
    rows = [f"{text}\t{answer.labels[0]}" for text, answer in zip(texts, task.classify(texts), strict=True)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    said = json.loads(command("evaluate", folder, "--labelled", tmp_path / "rows.tsv", "--json").out)
    assert (said["rows"], said["accuracy"]) == (6, 1.0)
    measures, classes = command("evaluate", folder, "--labelled", tmp_path / "rows.tsv").out.split("\n\n")
    assert measures.splitlines()[0].split() == ["rows", "6"]
    assert [line.split()[0] for line in classes.splitlines()] == ["class", *NAMES]
    refused = command("evaluate", folder, "--labelled", tmp_path / "rows.tsv", "--limit", 3)
    assert (refused.status, refused.err) == (
        2, "qkv: error: --limit is for documents and pairs: all labelled texts count\n",
    )  # fmt: skip


def test_of_two_classes_it_is_said_whose_f1_is_printed(command, tmp_path):
    two = saved_bert(tmp_path / "two", class_names=("bad", "good"))
    (tmp_path / "rows.tsv").write_text("text\tlabel\nthe cat\tgood\nx\tbad\n")
    shown = command("evaluate", two, "--labelled", tmp_path / "rows.tsv").out
    assert "\nf1 of good " in shown
    assert "\nf1_macro " in shown
