"""Documents come out of every kind of file, and every bad file is refused in a line that names the place."""

import gzip
import io
import json
import lzma
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data import documents, find_sources, read_documents
from qkv.data.documents import read_chunks
from qkv.data.text_sources import TextSource, open_source
from qkv.errors import InputError, MissingExtraError
from qkv.text import MAX_CHUNK_CHARACTERS, split_into_chunks

STORIES = "Once upon a time.\nThe end.\n<|endoftext|>\n\nÑandú 😀  \n<|endoftext|>\r\n\n<|endoftext|> \nLast"
EXPECTED = ["Once upon a time.\nThe end.", "Ñandú 😀", "Last"]


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.unknown"])
def test_a_text_file_is_parted_at_its_separator_lines(file, name):
    assert list(read_documents([file(name, STORIES)])) == EXPECTED


def test_a_separator_inside_a_line_is_text(file):
    assert list(read_documents([file("a.txt", "say <|endoftext|>\nor <|endoftext|> x")])) == [
        "say <|endoftext|>\nor <|endoftext|> x"
    ]


def test_a_file_without_separators_is_one_document(file):
    assert list(read_documents([file("a.txt", "\ufeff one\n\ntwo \n")])) == ["one\n\ntwo"]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_the_same(file, ending, compress):
    assert list(read_documents([file("a.txt" + ending, compress(STORIES.encode()))])) == EXPECTED
    lines = "".join(json.dumps({"text": text}) + "\n" for text in EXPECTED)
    assert list(read_documents([file("a.jsonl" + ending, compress(lines.encode()))])) == EXPECTED


def test_zst_files_are_the_same(file):
    zstandard = pytest.importorskip("zstandard")
    assert list(read_documents([file("a.txt.zst", zstandard.compress(STORIES.encode()))])) == EXPECTED
    with pytest.raises(InputError, match=r"b\.zst: cannot be read"):
        list(read_documents([file("b.zst", "no zstandard")]))


def test_zst_without_its_library_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"a\.zst: .*pip install 'qkv\[formats\]'"):
        list(read_documents([file("a.zst", b"x")]))


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STORIES.encode())))
    assert list(read_documents(["-"])) == EXPECTED
    with pytest.raises(InputError, match="can be read only once"):
        find_sources(["-", "-"])


def test_json_lines_by_field(file):
    path = file("a.jsonl", '{"text": "one", "body": "1"}\n\n{"text": " ", "body": "2"}\n{"text": "three", "body": "3"}')
    assert list(read_documents([path])) == ["one", "three"]
    assert list(read_documents([path], field="body")) == ["1", "2", "3"]


def test_tables_by_name_and_by_number(file):
    quoted = file("a.csv", 'text,label\n"one, ""two""\nthree",0\n\nfour,1\n')
    assert list(read_documents([quoted])) == ['one, "two"\nthree', "four"]
    raw = file("a.tsv", 'el "gato\tthe "cat\nsí\tyes\n')
    assert list(read_documents([raw], field="2")) == ['the "cat', "yes"]
    assert list(read_documents([raw], field="1")) == ['el "gato', "sí"]


def test_a_folder_gives_its_text_files_sorted_and_passes_over_empty_ones(file, tmp_path):
    for name, content in {"b/z.txt": "3", "b/a.jsonl": '{"text": "2"}', "a.txt.gz": gzip.compress(b"1")}.items():
        file(name, content)
    for name in ("c.png", ".hidden.txt", "empty.txt"):
        file(name, "" if "empty" in name else "no")
    assert list(read_documents([tmp_path])) == ["1", "2", "3"]


def test_a_field_longer_than_the_csv_modules_limit(file):
    long = "word " * 100_000
    assert list(read_documents([file("a.csv", f"text\n{long}\n")])) == [long.strip()]


BAD = {
    "empty": ("a.txt", b"", r"a\.txt: is empty: it holds no text"),
    "blank": ("a.txt", b" \n\n", r"a\.txt: is empty: it holds no text"),
    "empty table": ("a.csv", b"text\n", r"a\.csv: is empty"),
    "binary": ("a.txt", b"abc\0def", r"a\.txt: byte 3 is NUL: this is a binary file"),
    "binary lines": ("a.jsonl", b'{"text": "a"}\n\0', r"a\.jsonl: byte 14 is NUL"),
    "not utf-8": ("a.txt", b"ab\nc\xff\xfe", r"a\.txt: line 2: byte 4 \(0xFF\) is not UTF-8"),
    "cut short": ("a.txt", b"ab\n\xf0\x9f", r"a\.txt: line 2: byte 3 \(0xF0\) is not UTF-8"),
    "not utf-8 lines": ("a.tsv", b"text\nab\xe9\n", r"a\.tsv: line 2: byte 7 \(0xE9\) is not UTF-8"),
    "not json": ("a.jsonl", b'{"text": "a"}\n{"text"', r"a\.jsonl: line 2: not valid JSON"),
    "deep json": ("a.jsonl", b"[" * 100_000, r"a\.jsonl: line 1: not valid JSON"),
    "no object": ("a.jsonl", b"[1]", r"a\.jsonl: line 1: holds a list, not an object"),
    "no field": ("a.jsonl", b'{"body": 1}', r"a\.jsonl: line 1: has no field 'text' \(it has: body\)"),
    "no text": ("a.jsonl", b'{"text": 1}', r"a\.jsonl: line 1: field 'text' is a int, not text"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl: line 1: field 'text' holds half a surrogate"),
    "no column": ("a.csv", b"a,b\n1,2\n", r"a\.csv: has no column 'text' \(it has: a, b\)"),
    "short row": ("a.csv", b"a,text\n1,2\n3\n", r"a\.csv: line 3: has 1 columns, and column 'text' is 2"),
    "bad gz": ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read: Not a gzipped file"),
    "cut gz": ("a.txt.gz", gzip.compress(b"abc" * 99)[:-9], r"a\.txt\.gz: cannot be read"),
    "bad xz": ("a.txt.xz", b"no xz", r"a\.txt\.xz: cannot be read"),
    "cut xz": ("a.txt.xz", lzma.compress(b"abc" * 99)[:-9], r"a\.txt\.xz: cannot be read"),
}


@pytest.mark.parametrize(("name", "content", "line"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_in_a_line_that_names_the_place(file, name, content, line):
    with pytest.raises(InputError, match=line) as refusal:
        list(read_documents([file(name, content)]))
    assert "\n" not in str(refusal.value)


def test_a_folder_that_vanishes_while_it_is_read_is_one_line(tmp_path, monkeypatch):
    def vanish(_, pattern):
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "gone"))

    monkeypatch.setattr(Path, "rglob", vanish)
    with pytest.raises(InputError, match=r"cannot be read: No such file or directory: .*gone$"):
        find_sources([str(tmp_path)])


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: there is no such file or folder"):
        find_sources([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"holds no text \(\.txt, "):
        find_sources([tmp_path])


words = st.sampled_from(["a", "bb", "ñ", "😀", " ", "  ", "\n", "\n<|endoftext|>\n", "<|endoftext|>", "\r\n", "x" * 9])


@given(pieces=st.lists(words, max_size=40), block=st.integers(1, 50))
def test_documents_are_the_same_whatever_is_read_at_a_time(pieces, block):
    text = "".join(pieces)
    expected = [d.strip() for d in documents._SEPARATOR.split(text) if d.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK_BYTES", block)
        parts = list(read_chunks(TextSource("a.txt", is_explicit=False), io.BytesIO(text.encode())))
    found, open_ = [], ""
    for part in parts:
        open_ += part.text
        if part.is_last:
            found.append(open_)
            open_ = ""
    assert (found, open_) == (expected, "")


@given(text=st.lists(words.filter(lambda w: "<" not in w), max_size=60).map("".join), block=st.integers(1, 50))
def test_a_long_document_comes_in_the_same_parts_whatever_is_read_at_a_time(text, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK_BYTES", block)
        patch.setattr(documents, "MAX_CHUNK_CHARACTERS", 13)
        patch.setattr(documents, "split_into_chunks", partial(split_into_chunks, max_characters=13))
        parts = list(read_chunks(TextSource("a.txt", is_explicit=False), io.BytesIO(text.encode())))
    assert "".join(part.text for part in parts) == text.strip()
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True] * bool(parts)
    assert [part.text for part in parts] == (
        list(split_into_chunks(text.strip(), max_characters=13)) if text.strip() else []
    )


def test_one_line_of_many_megabytes_comes_in_parts(file):
    line = "word " * (2 * MAX_CHUNK_CHARACTERS)
    source = TextSource(str(file("a.txt", line)))
    with open_source(source) as (opened, stream):
        parts = list(read_chunks(source, stream))
    assert len(parts) > 9
    assert all(len(part.text) <= MAX_CHUNK_CHARACTERS for part in parts)
    assert all(after.text.startswith(" w") and not before.is_last for before, after in pairwise(parts))
    assert "".join(part.text for part in parts) == line.strip()
    assert opened.n_bytes == len(line)


@pytest.mark.parametrize("rest", ["", "\nmore"])
def test_the_rest_of_a_line_that_was_cut_is_no_separator(rest, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 26)
    monkeypatch.setattr(documents, "MAX_CHUNK_CHARACTERS", 13)
    monkeypatch.setattr(documents, "split_into_chunks", partial(split_into_chunks, max_characters=13))
    text = "x" * 13 + "<|endoftext|>" + rest
    parts = list(read_chunks(TextSource("a.txt"), io.BytesIO(text.encode())))
    assert "".join(part.text for part in parts) == text
    assert [part.is_last for part in parts].count(True) == 1


@pytest.mark.parametrize("chosen", ["[:-3]", "[-3:]", "[:2]", "[4:]", "[1:-2]", "[-5:-1]", "[-6:3]", "[:]", "[-99:]"])
def test_a_file_may_be_asked_for_some_of_its_documents(tmp_path, chosen):
    texts = [f"text {n}" for n in range(7)]
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    start, stop = (int(number) if number else None for number in chosen[1:-1].split(":"))
    assert list(read_documents([f"{path}{chosen}"])) == texts[start:stop]


def test_documents_that_are_not_there_are_an_empty_file(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(InputError, match=r"a.txt\[:-1\]: is empty"):
        list(read_documents([f"{tmp_path}/a.txt[:-1]"]))
    with pytest.raises(InputError, match=r"b.txt\[:-1\]: there is no such file"):
        list(read_documents([f"{tmp_path}/b.txt[:-1]"]))
    (tmp_path / "a.txt[:-1]").write_text("two")  # a file of that very name is that file
    assert list(read_documents([f"{tmp_path}/a.txt[:-1]"])) == ["two"]
