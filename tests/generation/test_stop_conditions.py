"""Stop strings are found across chunk boundaries and never emitted, and endless repetition is truncated."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.generation import StopStringFilter
from qkv.generation.sequence import MIN_REPEATS, truncate_repetition

letters = st.text(alphabet="aábñ😀", max_size=20)
strings = st.lists(st.text(alphabet="aábñ😀", min_size=1, max_size=4), max_size=3)


def truncate_at_first_stop(text, stops):
    """Slow reference: the text up to the stop string that ends first, and whether there is one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(letters, strings, st.data())
def test_the_emitted_text_ends_before_the_first_stop_string(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    stop_strings, emitted = StopStringFilter(stops), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        emitted += stop_strings.feed(text[start:end])
        if stop_strings.is_stopped:
            break
    else:
        emitted += stop_strings.flush()
    expected, is_stopped = truncate_at_first_stop(text, stops)
    assert (emitted, stop_strings.is_stopped) == (expected, is_stopped)


def test_of_overlapping_stop_strings_the_first_to_end_counts():
    for chunks in (["aba"], ["a", "ba"], ["ab", "a"]):
        stop_strings = StopStringFilter(["b", "aba"])
        assert "".join(stop_strings.feed(chunk) for chunk in chunks if not stop_strings.is_stopped) == "a"


@given(letters, strings)
@example("aab", ["aab"])
def test_emitted_text_is_always_a_prefix_of_the_result(text, stops):
    """Fed letter by letter, the emitted text is always a prefix of the final text."""
    expected, _ = truncate_at_first_stop(text, stops)
    stop_strings, emitted = StopStringFilter(stops), ""
    for letter in text:
        emitted += stop_strings.feed(letter)
        assert expected.startswith(emitted)
        if stop_strings.is_stopped:
            break


def test_only_possible_stop_strings_are_buffered():
    stop_strings = StopStringFilter(["END"])
    assert stop_strings.feed("the E") == "the "
    assert stop_strings.feed("N") == ""
    assert stop_strings.feed("T") == "ENT"
    assert stop_strings.flush() == ""


def test_an_empty_stop_string_is_rejected():
    with pytest.raises(InputError, match=r"\b1 character"):
        StopStringFilter(["x", ""])


@given(
    prefix=st.lists(st.integers(0, 5), max_size=5),
    pattern=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    n_repeats=st.integers(MIN_REPEATS, 9),
    n_partial=st.integers(0, 3),
)
def test_a_repeated_pattern_is_truncated_to_one_occurrence(prefix, pattern, n_repeats, n_partial):
    ids = prefix + pattern * n_repeats + pattern[: min(n_partial, len(pattern) - 1)]
    truncated = truncate_repetition(ids)
    assert ids[: len(truncated)] == truncated
    assert len(truncated) <= len(prefix) + len(pattern)
    assert truncate_repetition(truncated) == truncated


def test_three_repeats_or_repeats_before_the_end_are_truncated():
    for ids in ([], [3], [7, 3, 3, 3], [1, 2] * 3, [5, 5, 5, 5, 5, 2], list(range(11))):
        assert truncate_repetition(ids) == ids
