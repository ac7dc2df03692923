"""Documents are read from all file types, and errors contain the file and line."""

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

from qkv.data import documents, parse_text_sources, read_documents
from qkv.data.documents import TextSource, open_raw_and_decompressed, read_chunks
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
def test_a_text_file_is_split_at_separator_lines(file, name):
    assert list(read_documents([file(name, STORIES)])) == EXPECTED


def test_a_separator_within_a_line_is_text(file):
    assert list(read_documents([file("a.txt", "say <|endoftext|>\nor <|endoftext|> x")])) == [
        "say <|endoftext|>\nor <|endoftext|> x"
    ]


def test_a_file_without_separators_is_one_document(file):
    assert list(read_documents([file("a.txt", "\ufeff one\n\ntwo \n")])) == ["one\n\ntwo"]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_read(file, suffix, compress):
    assert list(read_documents([file("a.txt" + suffix, compress(STORIES.encode()))])) == EXPECTED
    lines = "".join(json.dumps({"text": text}) + "\n" for text in EXPECTED)
    assert list(read_documents([file("a.jsonl" + suffix, compress(lines.encode()))])) == EXPECTED


def test_zst_files_are_read(file):
    zstandard = pytest.importorskip("zstandard")
    assert list(read_documents([file("a.txt.zst", zstandard.compress(STORIES.encode()))])) == EXPECTED
    with pytest.raises(InputError, match=r"b\.zst: "):
        list(read_documents([file("b.zst", "no zstandard")]))


def test_the_error_for_zst_without_its_library_contains_the_install_command(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"a\.zst: .*pip install 'qkv\[formats\]'"):
        list(read_documents([file("a.zst", b"x")]))


def test_standard_input_can_be_read_once(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STORIES.encode())))
    assert list(read_documents(["-"])) == EXPECTED
    with pytest.raises(InputError, match=r"\(-\)"):
        parse_text_sources(["-", "-"])


def test_the_field_of_json_lines_can_be_selected(file):
    path = file("a.jsonl", '{"text": "one", "body": "1"}\n\n{"text": " ", "body": "2"}\n{"text": "three", "body": "3"}')
    assert list(read_documents([path])) == ["one", "three"]
    assert list(read_documents([path], field="body")) == ["1", "2", "3"]


def test_table_columns_are_selected_by_name_or_number(file):
    quoted = file("a.csv", 'text,label\n"one, ""two""\nthree",0\n\nfour,1\n')
    assert list(read_documents([quoted])) == ['one, "two"\nthree', "four"]
    raw = file("a.tsv", 'el "gato\tthe "cat\nsí\tyes\n')
    assert list(read_documents([raw], field="2")) == ['the "cat', "yes"]
    assert list(read_documents([raw], field="1")) == ['el "gato', "sí"]


def test_text_files_of_a_folder_are_sorted_and_empty_files_are_skipped(file, tmp_path):
    for name, content in {"b/z.txt": "3", "b/a.jsonl": '{"text": "2"}', "a.txt.gz": gzip.compress(b"1")}.items():
        file(name, content)
    for name in ("c.png", ".hidden.txt", "empty.txt"):
        file(name, "" if "empty" in name else "no")
    assert list(read_documents([tmp_path])) == ["1", "2", "3"]


def test_a_field_may_exceed_the_default_limit_of_the_csv_module(file):
    long = "word " * 100_000
    assert list(read_documents([file("a.csv", f"text\n{long}\n")])) == [long.strip()]


INVALID = {
    "empty": ("a.txt", b"", r"a\.txt: "),
    "blank": ("a.txt", b" \n\n", r"a\.txt: "),
    "empty table": ("a.csv", b"text\n", r"a\.csv: "),
    "binary": ("a.txt", b"abc\0def", r"a\.txt: .*\b3 .*NUL"),
    "binary lines": ("a.jsonl", b'{"text": "a"}\n\0', r"a\.jsonl: .*\b14 .*NUL"),
    "not utf-8": ("a.txt", b"ab\nc\xff\xfe", r"a\.txt: line 2: .*UTF-8.*\b4 \(0xFF\)"),
    "incomplete character": ("a.txt", b"ab\n\xf0\x9f", r"a\.txt: line 2: .*UTF-8.*\b3 \(0xF0\)"),
    "not utf-8 lines": ("a.tsv", b"text\nab\xe9\n", r"a\.tsv: line 2: .*UTF-8.*\b7 \(0xE9\)"),
    "not json": ("a.jsonl", b'{"text": "a"}\n{"text"', r"a\.jsonl: line 2: .*JSON"),
    "deep json": ("a.jsonl", b"[" * 100_000, r"a\.jsonl: line 1: .*JSON"),
    "no object": ("a.jsonl", b"[1]", r"a\.jsonl: line 1: .*\blist\b"),
    "no field": ("a.jsonl", b'{"body": 1}', r"a\.jsonl: line 1: .*'text'.*\bbody\b"),
    "no text": ("a.jsonl", b'{"text": 1}', r"a\.jsonl: line 1: .*'text'.*\bint\b"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl: line 1: .*'text'.*surrogate"),
    "no column": ("a.csv", b"a,b\n1,2\n", r"a\.csv: .*'text'.*\ba, b\b"),
    "short row": ("a.csv", b"a,text\n1,2\n3\n", r"a\.csv: line 3: .*'text'.*\b2\b.*\b1\b"),
    "not gzip": ("a.txt.gz", b"no gzip", r"a\.txt\.gz: .*Not a gzipped file"),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"abc" * 99)[:-9], r"a\.txt\.gz: "),
    "not xz": ("a.txt.xz", b"no xz", r"a\.txt\.xz: "),
    "truncated xz": ("a.txt.xz", lzma.compress(b"abc" * 99)[:-9], r"a\.txt\.xz: "),
}


@pytest.mark.parametrize(("name", "content", "pattern"), INVALID.values(), ids=INVALID.keys())
def test_the_error_for_an_invalid_file_is_one_line_with_its_location(file, name, content, pattern):
    with pytest.raises(InputError, match=pattern) as error:
        list(read_documents([file(name, content)]))
    assert "\n" not in str(error.value)


def test_a_folder_that_is_deleted_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    def raise_not_found(_, pattern):
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "gone"))

    monkeypatch.setattr(Path, "rglob", raise_not_found)
    with pytest.raises(InputError, match=r"No such file or directory: .*gone$"):
        parse_text_sources([str(tmp_path)])


def test_missing_files_and_folders_without_text_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: "):
        parse_text_sources([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"\(\.txt, "):
        parse_text_sources([tmp_path])


words = st.sampled_from(["a", "bb", "ñ", "😀", " ", "  ", "\n", "\n<|endoftext|>\n", "<|endoftext|>", "\r\n", "x" * 9])


@given(text=st.lists(words, max_size=40).map("".join), block=st.integers(1, 50))
def test_documents_do_not_depend_on_the_block_size(text, block):
    expected = [document.strip() for document in documents._SEPARATOR.split(text) if document.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK_BYTES", block)
        chunks = list(read_chunks(TextSource("a.txt", is_explicit=False), io.BytesIO(text.encode())))
    complete, unfinished = [], ""
    for chunk in chunks:
        unfinished += chunk.text
        if chunk.is_last:
            complete.append(unfinished)
            unfinished = ""
    assert (complete, unfinished) == (expected, "")


@given(text=st.lists(words.filter(lambda w: "<" not in w), max_size=60).map("".join), block=st.integers(1, 50))
def test_the_chunks_of_a_long_document_do_not_depend_on_the_block_size(text, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK_BYTES", block)
        patch.setattr(documents, "MAX_CHUNK_CHARACTERS", 13)
        patch.setattr(documents, "split_into_chunks", partial(split_into_chunks, max_characters=13))
        chunks = list(read_chunks(TextSource("a.txt", is_explicit=False), io.BytesIO(text.encode())))
    assert "".join(chunk.text for chunk in chunks) == text.strip()
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True] * bool(chunks)
    assert [chunk.text for chunk in chunks] == (
        list(split_into_chunks(text.strip(), max_characters=13)) if text.strip() else []
    )


def test_a_line_of_many_megabytes_is_read_in_chunks(file):
    line = "word " * (2 * MAX_CHUNK_CHARACTERS)
    source = TextSource(str(file("a.txt", line)))
    with open_raw_and_decompressed(source) as (reader, stream):
        chunks = list(read_chunks(source, stream))
    assert len(chunks) > 9
    assert all(len(chunk.text) <= MAX_CHUNK_CHARACTERS for chunk in chunks)
    assert all(after.text.startswith(" w") and not before.is_last for before, after in pairwise(chunks))
    assert "".join(chunk.text for chunk in chunks) == line.strip()
    assert reader.n_bytes == len(line)


@pytest.mark.parametrize("rest", ["", "\nmore"])
def test_the_rest_of_a_split_line_is_not_a_separator(rest, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 26)
    monkeypatch.setattr(documents, "MAX_CHUNK_CHARACTERS", 13)
    monkeypatch.setattr(documents, "split_into_chunks", partial(split_into_chunks, max_characters=13))
    text = "x" * 13 + "<|endoftext|>" + rest
    chunks = list(read_chunks(TextSource("a.txt"), io.BytesIO(text.encode())))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.is_last for chunk in chunks].count(True) == 1


@pytest.mark.parametrize("slice_", ["[:-3]", "[-3:]", "[:2]", "[4:]", "[1:-2]", "[-5:-1]", "[-6:3]", "[:]", "[-99:]"])
def test_a_slice_of_the_documents_of_a_file_can_be_read(tmp_path, slice_):
    texts = [f"text {n}" for n in range(7)]
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    start, stop = (int(number) if number else None for number in slice_[1:-1].split(":"))
    assert list(read_documents([f"{path}{slice_}"])) == texts[start:stop]


def test_an_empty_slice_is_an_error_unless_a_file_has_that_name(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(InputError, match=r"a\.txt\[:-1\]: "):
        list(read_documents([f"{tmp_path}/a.txt[:-1]"]))
    with pytest.raises(InputError, match=r"b\.txt\[:-1\]: "):
        list(read_documents([f"{tmp_path}/b.txt[:-1]"]))
    (tmp_path / "a.txt[:-1]").write_text("two")
    assert list(read_documents([f"{tmp_path}/a.txt[:-1]"])) == ["two"]
