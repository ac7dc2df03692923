"""Labelled texts come out of tables and JSON lines; every bad row is refused in a line that names it."""

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


def test_a_table_gives_texts_labels_and_lines(file):
    found = read_labeled_texts(file(TWO + "\n\n"))
    assert found.texts == [("a good film",), ("a bad film",)]
    assert (found.labels, found.lines, found.is_pairs) == ([("good",), ("bad",)], [2, 3], False)
    assert found.class_names() == ("bad", "good")
    assert found.class_indices(found.class_names()) == [(1,), (0,)]


def test_a_pair_has_two_columns_and_a_number_its_own(file):
    name = file("text_a\ttext_b\tlabel\tscore\nA dog\tA cat\tneutral\t3.5\n")
    found = read_labeled_texts(name, is_numeric=True)
    assert (found.texts, found.is_pairs, found.numeric_labels()) == ([("A dog", "A cat")], True, [3.5])
    assert read_labeled_texts(name).labels == [("neutral",)]


def test_columns_are_chosen_by_name_or_by_number(file):
    name = file('id,said,kind\n1,"one, two",x\n2,three,y\n', "t.csv")
    assert read_labeled_texts(name, ColumnNames(text=("said",), label="kind")).texts == [("one, two",), ("three",)]
    bare = file("x\tone\ny\ttwo\n")
    assert read_labeled_texts(bare, ColumnNames(text=("2",), label="1")).labels == [("x",), ("y",)]


def test_json_lines_and_compressed_files_are_read(file):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    content = "\n".join(map(json.dumps, rows)).encode()
    assert read_labeled_texts(file(content, "t.jsonl")).labels == [("1",), ("0",)]
    assert read_labeled_texts(file(lzma.compress(content), "t.jsonl.xz")).texts == [("a",), ("b",)]


def test_a_text_may_have_several_labels_or_none(file):
    name = file("text\tlabel\na\tx, y\nb\t\n")
    assert read_labeled_texts(name, multi_label=True).labels == [("x", "y"), ()]
    lists = file(json.dumps({"text": "a", "label": ["y", "x"]}), "t.jsonl")
    assert read_labeled_texts(lists, multi_label=True).labels == [("x", "y")]


def test_a_quotation_mark_in_a_tsv_is_a_character(file):
    assert read_labeled_texts(file('text\tlabel\n"so" bad\tx\n')).texts == [('"so" bad',)]


def test_blank_lines_at_the_end_are_no_rows(file):
    assert read_labeled_texts(file("text\tlabel\na\tx\n\n  \n\t\n")).lines == [2]


def test_rows_in_memory_are_taken_too():
    found = labeled_texts_from_rows("train", [("a", "b", 1), ("c", "d", 0)])
    assert (found.is_pairs, found.labels) == (True, [("1",), ("0",)])
    with pytest.raises(InputError, match=r"train: row 1 has 1 entries; it is \(text, label\)"):
        labeled_texts_from_rows("train", [("a",)])
    with pytest.raises(InputError, match="train: some rows have one text, some two"):
        labeled_texts_from_rows("train", [("a", "x"), ("a", "b", "y")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text\ttag\na\tx\n", "t.tsv: has no column 'label' (it has: text, tag); name another: --label COLUMN"),
        ("said\tlabel\na\tx\n", "t.tsv: has no column 'text' (it has: said, label); name another: --text COLUMN"),
        ("text\tlabel\na\tx\nb\n", "t.tsv: line 3: has 1 columns, the first row has 2"),
        ("text\tlabel\na\tb\tx\n", "t.tsv: line 2: has 3 columns, the first row has 2"),
        ("text\tlabel\na\tx\n\nb\ty\n", "t.tsv: line 3: is empty, and rows follow it"),
        ("text\tlabel\n \tx\n", "t.tsv: line 2: 'text' is empty"),
        ("text\tlabel\na\t\n", "t.tsv: line 2: 'label' is empty"),
        (b"text\tlabel\na\tx\ncaf\xe9\ty\n", "t.tsv: line 3: byte 18 (0xE9) is not UTF-8"),
        ("text\tlabel\n", "t.tsv: holds no row with text and label"),
        ("", "t.tsv: holds no row with text and label"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(file, content, message):
    with pytest.raises(InputError) as refused:
        read_labeled_texts(file(content))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "t.jsonl: line 1: not valid JSON"),
        ("[1]", "t.jsonl: line 1: holds a list, not an object"),
        ('{"text": 3, "label": "x"}', "t.jsonl: line 1: 'text' is a int, not text"),
        ('{"text": "a", "label": ["x"]}', "t.jsonl: line 1: 'label' is a list"),
        ('{"text": "a", "label": null}', "t.jsonl: line 1: 'label' is empty"),
        ('{"text": "a", "label": "x"}\n{"text": "b"}', r"t.jsonl: line 2: has no field 'label' \(it has: text\)"),
    ],
)
def test_a_bad_json_line_is_refused_in_one_line(file, line, message):
    with pytest.raises(InputError, match=message):
        read_labeled_texts(file(line, "t.jsonl"))


def test_what_would_be_read_in_part_is_refused(file, tmp_path):
    name = file(TWO)
    (tmp_path / "many").mkdir()
    for inner in ("many/a.tsv", "many/b.tsv"):
        file(TWO, inner)
    with pytest.raises(InputError, match="many: is a folder, not a file"):
        read_labeled_texts("many")
    (tmp_path / "bare").mkdir()  # said without a walk through it, which may take long or fail
    with pytest.raises(InputError, match="bare: is a folder, not a file"):
        read_labeled_texts("bare")
    with pytest.raises(InputError, match=r"t\.tsv\[:1\]: this file is read whole"):
        read_labeled_texts(f"{name}[:1]")


def test_a_column_that_is_there_twice_is_refused(file):
    with pytest.raises(InputError, match=r"t\.tsv: line 1: columns 1 and 3 are both called 'text'"):
        read_labeled_texts(file("text\tlabel\ttext\na\tx\tb\n"))


@pytest.mark.parametrize(("row", "message"), [((" ", "x"), "'text' is empty"), ((3, "x"), "'text' is a int, not text")])
def test_rows_in_memory_are_checked_as_those_of_files_are(row, message):
    with pytest.raises(InputError, match=f"mine: row 2: {message}"):
        labeled_texts_from_rows("mine", [("a", "y"), row])


def test_an_unknown_ending_is_refused(file):
    with pytest.raises(InputError, match=r"t.txt: labelled texts are .tsv, .csv or .jsonl, not '.txt'"):
        read_labeled_texts(file(TWO, "t.txt"))


def test_one_class_only_is_refused():
    with pytest.raises(InputError, match="train: all 2 rows have the label 'x'; there must be at least 2"):
        labeled_texts_from_rows("train", [("a", "x"), ("b", "x")]).class_names()


def test_a_label_unseen_in_training_is_refused(file):
    found = read_labeled_texts(file(TWO))
    with pytest.raises(InputError) as refused:
        found.class_indices(("bad", "goods"))
    expected = "t.tsv: line 2: the label 'good' is not among the 2 of training (bad, goods); did you mean 'goods'?"
    assert str(refused.value) == expected


@pytest.mark.parametrize(("label", "message"), [("much", "'much' is no number"), ("nan", "nan is no finite number")])
def test_a_number_that_is_none_is_refused(file, label, message):
    found = read_labeled_texts(file(f"text\tscore\na\t1.5\nb\t{label}\n"), is_numeric=True)
    with pytest.raises(InputError, match=f"t.tsv: line 3: {message}"):
        found.numeric_labels()
