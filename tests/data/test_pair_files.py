"""Pairs are read as they stand, cleaned with a count, and refused where their sides are swapped."""

import lzma

import pytest

from qkv.data.pair_files import PairFile, PairFilter, check_not_swapped
from qkv.errors import InputError
from tests.data.pair_corpus import reversed_pairs, write_tsv


def test_a_table_is_read_compressed_or_not_and_further_columns_are_left(tmp_path):
    text = "¿Qué? \tWhat?\nsí\tyes\tby someone\n\n"
    (tmp_path / "a.tsv").write_text(text)
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.tsv", "a.tsv.xz"):
        assert list(PairFile(source=tmp_path / name).read()) == [("¿Qué?", "What?"), ("sí", "yes"), ("", "")]


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_two_aligned_files_are_one(tmp_path, ending):
    for name, text in (("c.es", "uno\ndos\n"), ("c.en", "one\ntwo\n")):
        data = text.encode()
        (tmp_path / f"{name}{ending}").write_bytes(lzma.compress(data) if ending else data)
    file = PairFile.from_source(tmp_path / f"c.es{ending}", ".en")
    assert list(file.read()) == [("uno", "one"), ("dos", "two")]


def test_what_is_no_pair_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nalone\n")
    with pytest.raises(InputError, match=r"a.tsv: line 2: has 1 column; a pair has 2"):
        list(PairFile(source=tmp_path / "a.tsv").read())
    (tmp_path / "c.es").write_text("uno\ndos\n")
    with pytest.raises(InputError, match=r"c.en: there is no such file; it should hold the targets of .*c.es"):
        PairFile.from_source(tmp_path / "c.es", ".en")
    (tmp_path / "c.en").write_text("one\n")
    with pytest.raises(InputError, match=r"c.en: has 1 lines, .*c.es has more"):
        list(PairFile.from_source(tmp_path / "c.es", ".en").read())


def test_a_folder_is_no_file_of_pairs(tmp_path):
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text("hola\thello\n")
    with pytest.raises(InputError, match="is a folder, not a file"):
        list(PairFile(source=tmp_path).read())


def test_cleaning_counts_what_it_drops_and_keeps_case_and_punctuation():
    clean = PairFilter(max_length_ratio=2.0)
    kept = [("Go!", "¡Váyase ya!"), ("¿Qué?", "What?"), ("What?", "¿Qué?")]
    dropped = [("", "b"), ("a", ""), ("¿Qué?", "What?"), ("a" * 20, "b" * 41)]
    assert list(clean([*kept, *dropped])) == kept
    assert clean.dropped == {"empty": 2, "repeated": 1, "uneven": 1}
    assert list(clean(kept[:1])) == []


def test_swapped_sides_are_caught_and_one_language_on_both_sides_is_not(tmp_path):
    pairs = reversed_pairs(50)
    swapped = [(target, source) for source, target in reversed_pairs(50, seed=1)]
    with pytest.raises(InputError, match=r"dev.tsv: its sources are in the language of the other files' targets"):
        check_not_swapped(pairs, PairFile(source=write_tsv(tmp_path / "dev.tsv", swapped)).read(), name="dev.tsv")
    check_not_swapped(pairs, reversed_pairs(50, seed=1), name="dev.tsv")
    small = [(source, target.lower()) for source, target in pairs]
    check_not_swapped(small, [(target, source) for source, target in small], name="dev.tsv")
