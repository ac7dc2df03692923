"""Labeled texts are read from tables and JSON lines, and errors contain the file and line."""

import json
import lzma

import pytest

from qkv.data.labeled_texts import ColumnNames, labeled_texts_from_rows, read_labeled_texts
from qkv.errors import InputError

TWO = "text\tlabel\na good film\tgood\na bad film\tbad\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content, name="t.tsv"):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def test_a_table_is_read_as_texts_labels_and_lines(file):
    labeled = read_labeled_texts(file(TWO + "\n\n"))
    assert labeled.texts == [("a good film",), ("a bad film",)]
    assert (labeled.labels, labeled.line_numbers, labeled.is_pairs) == ([("good",), ("bad",)], [2, 3], False)
    assert labeled.class_names() == ("bad", "good")
    assert labeled.class_indices(labeled.class_names()) == [(1,), (0,)]


def test_pairs_have_two_text_columns_and_scores_a_separate_column(file):
    name = file("text_a\ttext_b\tlabel\tscore\nA dog\tA cat\tneutral\t3.5\n")
    labeled = read_labeled_texts(name, prefer_score_column=True)
    assert (labeled.texts, labeled.is_pairs, labeled.numeric_labels()) == ([("A dog", "A cat")], True, [3.5])
    assert read_labeled_texts(name).labels == [("neutral",)]


def test_columns_are_selected_by_name_or_number(file):
    name = file('id,review,kind\n1,"one, two",x\n2,three,y\n', "t.csv")
    assert read_labeled_texts(name, ColumnNames(text=("review",), label="kind")).texts == [("one, two",), ("three",)]
    without_header = file("x\tone\ny\ttwo\n")
    assert read_labeled_texts(without_header, ColumnNames(text=("2",), label="1")).labels == [("x",), ("y",)]


def test_json_lines_and_compressed_files_are_read(file):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    content = "\n".join(map(json.dumps, rows)).encode()
    assert read_labeled_texts(file(content, "t.jsonl")).labels == [("1",), ("0",)]
    assert read_labeled_texts(file(lzma.compress(content), "t.jsonl.xz")).texts == [("a",), ("b",)]


def test_a_text_may_have_any_number_of_labels(file):
    name = file("text\tlabel\na\tx, y\nb\t\n")
    assert read_labeled_texts(name, multi_label=True).labels == [("x", "y"), ()]
    lists = file(json.dumps({"text": "a", "label": ["y", "x"]}), "t.jsonl")
    assert read_labeled_texts(lists, multi_label=True).labels == [("x", "y")]


def test_quotation_marks_in_a_tsv_are_ordinary_characters(file):
    assert read_labeled_texts(file('text\tlabel\n"so" bad\tx\n')).texts == [('"so" bad',)]


def test_blank_lines_at_the_end_are_ignored(file):
    assert read_labeled_texts(file("text\tlabel\na\tx\n\n  \n\t\n")).line_numbers == [2]


def test_rows_in_memory_are_converted():
    labeled = labeled_texts_from_rows("train", [("a", "b", 1), ("c", "d", 0)])
    assert (labeled.is_pairs, labeled.labels) == (True, [("1",), ("0",)])
    with pytest.raises(InputError, match=r"train: row 1: .*\(text, label\).*\b1\b"):
        labeled_texts_from_rows("train", [("a",)])
    with pytest.raises(InputError, match="train: "):
        labeled_texts_from_rows("train", [("a", "x"), ("a", "b", "y")])


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("text\ttag\na\tx\n", r"t\.tsv: .*'label'.*\btext, tag\b.*--label-column COLUMN"),
        ("review\tlabel\na\tx\n", r"t\.tsv: .*'text'.*\breview, label\b.*--text-column COLUMN"),
        ("text\tlabel\na\tx\nb\n", r"t\.tsv: line 3: .*\b2 columns.*\b1$"),
        ("text\tlabel\na\tb\tx\n", r"t\.tsv: line 2: .*\b2 columns.*\b3$"),
        ("text\tlabel\na\tx\n\nb\ty\n", r"t\.tsv: line 3 "),
        ("text\tlabel\n \tx\n", r"t\.tsv: line 2: 'text' "),
        ("text\tlabel\na\t\n", r"t\.tsv: line 2: 'label' "),
        (b"text\tlabel\na\tx\ncaf\xe9\ty\n", r"t\.tsv: line 3: .*UTF-8.*\b18 \(0xE9\)"),
        ("text\tlabel\n", r"t\.tsv: "),
        ("", r"t\.tsv: "),
    ],
)
def test_the_error_for_an_invalid_table_is_one_line_with_its_location(file, content, pattern):
    with pytest.raises(InputError, match=f"^{pattern}") as error:
        read_labeled_texts(file(content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("{", r"t\.jsonl: line 1: .*JSON"),
        ("[1]", r"t\.jsonl: line 1: .*\blist\b"),
        ('{"text": 3, "label": "x"}', r"t\.jsonl: line 1: 'text' .*\bint\b"),
        ('{"text": "a", "label": ["x"]}', r"t\.jsonl: line 1: 'label' .*\blist\b"),
        ('{"text": "a", "label": null}', r"t\.jsonl: line 1: 'label' "),
        ('{"text": "a", "label": "x"}\n{"text": "b"}', r"t\.jsonl: line 2: .*'label'.*\btext\b"),
    ],
)
def test_the_error_for_an_invalid_json_line_contains_its_location(file, line, pattern):
    with pytest.raises(InputError, match=pattern):
        read_labeled_texts(file(line, "t.jsonl"))


def test_folders_and_slices_are_errors(file, tmp_path):
    name = file(TWO)
    (tmp_path / "many").mkdir()
    for inner in ("many/a.tsv", "many/b.tsv"):
        file(TWO, inner)
    with pytest.raises(InputError, match=r"many: .*folder"):
        read_labeled_texts("many")
    (tmp_path / "empty").mkdir()  # the folder must not be searched, which may be slow or fail
    with pytest.raises(InputError, match=r"empty: .*folder"):
        read_labeled_texts("empty")
    with pytest.raises(InputError, match=r"t\.tsv\[:1\]: "):
        read_labeled_texts(f"{name}[:1]")


def test_duplicate_columns_are_errors(file):
    with pytest.raises(InputError, match=r"t\.tsv: line 1: .*\b1 and 3\b.*'text'"):
        read_labeled_texts(file("text\tlabel\ttext\na\tx\tb\n"))


@pytest.mark.parametrize(("row", "pattern"), [((" ", "x"), "'text' .*empty"), ((3, "x"), r"'text' .*\bint\b")])
def test_rows_in_memory_are_checked_like_files(row, pattern):
    with pytest.raises(InputError, match=f"mine: row 2: {pattern}"):
        labeled_texts_from_rows("mine", [("a", "y"), row])


def test_an_unknown_suffix_is_an_error(file):
    with pytest.raises(InputError, match=r"t\.txt: .*\.tsv, \.csv or \.jsonl.*'\.txt'"):
        read_labeled_texts(file(TWO, "t.txt"))


def test_a_single_class_is_an_error():
    with pytest.raises(InputError, match=r"train: .*\b2 rows.*'x'.*\b2\b"):
        labeled_texts_from_rows("train", [("a", "x"), ("b", "x")]).class_names()


def test_a_label_that_is_missing_in_training_is_an_error(file):
    labeled = read_labeled_texts(file(TWO))
    with pytest.raises(InputError, match=r"t\.tsv: line 2: .*'good'.*'goods'.*\b2\b.*\bbad, goods\b"):
        labeled.class_indices(("bad", "goods"))


@pytest.mark.parametrize("label", ["much", "nan"])
def test_a_score_that_is_not_a_finite_number_is_an_error(file, label):
    labeled = read_labeled_texts(file(f"text\tscore\na\t1.5\nb\t{label}\n"), prefer_score_column=True)
    with pytest.raises(InputError, match=rf"t\.tsv: line 3: .*\b{label}\b"):
        labeled.numeric_labels()
