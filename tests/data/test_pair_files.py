"""Translation pairs are read, filtered, and checked for swapped languages."""

import lzma

import pytest

from qkv.data.pair_files import EmptyUnevenDuplicatePairFilter, PairFile, check_languages_not_swapped
from qkv.errors import InputError
from tests.data.pair_corpus import reversed_pairs, write_tsv


def test_tab_separated_files_may_be_compressed_and_have_further_columns(tmp_path):
    text = "¿Qué? \tWhat?\nsí\tyes\tby someone\n\n"
    (tmp_path / "a.tsv").write_text(text)
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.tsv", "a.tsv.xz"):
        assert list(PairFile(source=tmp_path / name).read()) == [("¿Qué?", "What?"), ("sí", "yes"), ("", "")]


@pytest.mark.parametrize("compression", ["", ".xz"])
def test_line_aligned_files_are_read_as_pairs(tmp_path, compression):
    for name, text in (("c.es", "uno\ndos\n"), ("c.en", "one\ntwo\n")):
        data = text.encode()
        (tmp_path / f"{name}{compression}").write_bytes(lzma.compress(data) if compression else data)
    file = PairFile.from_source(tmp_path / f"c.es{compression}", ".en")
    assert list(file.read()) == [("uno", "one"), ("dos", "two")]


def test_incomplete_pairs_and_missing_targets_are_errors(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nalone\n")
    with pytest.raises(InputError, match=r"a\.tsv: line 2: .*\b2\b.*\b1\b"):
        list(PairFile(source=tmp_path / "a.tsv").read())
    (tmp_path / "c.es").write_text("uno\ndos\n")
    with pytest.raises(InputError, match=r"c\.en: .*c\.es"):
        PairFile.from_source(tmp_path / "c.es", ".en")
    (tmp_path / "c.en").write_text("one\n")
    with pytest.raises(InputError, match=r"c\.en: .*\b1 lines.*c\.es"):
        list(PairFile.from_source(tmp_path / "c.es", ".en").read())


def test_a_folder_instead_of_a_file_is_an_error(tmp_path):
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text("hola\thello\n")
    with pytest.raises(InputError, match="folder"):
        list(PairFile(source=tmp_path).read())


def test_the_filter_counts_dropped_pairs_and_keeps_case_and_punctuation():
    pair_filter = EmptyUnevenDuplicatePairFilter(max_length_ratio=2.0)
    valid = [("Go!", "¡Váyase ya!"), ("¿Qué?", "What?"), ("What?", "¿Qué?")]
    invalid = [("", "b"), ("a", ""), ("¿Qué?", "What?"), ("a" * 20, "b" * 41)]
    assert list(pair_filter([*valid, *invalid])) == valid
    assert pair_filter.dropped == {"empty": 2, "repeated": 1, "uneven": 1}
    assert list(pair_filter(valid[:1])) == []


def test_swapped_languages_are_an_error_unless_both_sides_have_the_same_language(tmp_path):
    pairs = reversed_pairs(50)
    swapped = [(target, source) for source, target in reversed_pairs(50, seed=1)]
    with pytest.raises(InputError, match=r"dev\.tsv: .*swapped"):
        check_languages_not_swapped(
            pairs, PairFile(source=write_tsv(tmp_path / "dev.tsv", swapped)).read(), name="dev.tsv"
        )
    check_languages_not_swapped(pairs, reversed_pairs(50, seed=1), name="dev.tsv")
    same_language = [(source, target.lower()) for source, target in pairs]
    check_languages_not_swapped(same_language, [(target, source) for source, target in same_language], name="dev.tsv")
