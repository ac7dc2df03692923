"""A stop string ends a text wherever its pieces are parted, and no piece of it is ever shown; a loop is left."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.generation import StopStrings
from qkv.generation.stop_conditions import MIN_REPEATS, truncate_repetition

letters = st.text(alphabet="aábñ😀", max_size=20)
strings = st.lists(st.text(alphabet="aábñ😀", min_size=1, max_size=4), max_size=3)


def cut_at_the_first(text, stops):
    """The slow reference: the text up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(letters, strings, st.data())
def test_pieces_joined_are_the_text_up_to_the_first_stop_string(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    stopping, shown = StopStrings(stops), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += stopping.feed(text[start:end])
        if stopping.is_stopped:
            break
    else:
        shown += stopping.flush()
    expected, is_stopped = cut_at_the_first(text, stops)
    assert (shown, stopping.is_stopped) == (expected, is_stopped)


def test_of_two_that_overlap_the_one_that_is_complete_first_counts():
    for pieces in (["aba"], ["a", "ba"], ["ab", "a"]):
        stopping = StopStrings(["b", "aba"])
        assert "".join(stopping.feed(piece) for piece in pieces if not stopping.is_stopped) == "a"


@given(letters, strings)
@example("aab", ["aab"])
def test_what_is_shown_is_never_taken_back(text, stops):
    """Letter by letter: what is shown is always the beginning of what is shown in the end."""
    expected, _ = cut_at_the_first(text, stops)
    stopping, shown = StopStrings(stops), ""
    for letter in text:
        shown += stopping.feed(letter)
        assert expected.startswith(shown)
        if stopping.is_stopped:
            break


def test_nothing_is_held_back_that_cannot_become_a_stop_string():
    stopping = StopStrings(["END"])
    assert stopping.feed("the E") == "the "
    assert stopping.feed("N") == ""
    assert stopping.feed("T") == "ENT"
    assert stopping.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="a stop string is empty: 0 characters"):
        StopStrings(["x", ""])


@given(
    head=st.lists(st.integers(0, 5), max_size=5),
    loop=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rounds=st.integers(MIN_REPEATS, 9),
    begun=st.integers(0, 3),
)
def test_a_loop_is_left_after_one_round(head, loop, rounds, begun):
    ids = head + loop * rounds + loop[: min(begun, len(loop) - 1)]
    kept = truncate_repetition(ids)
    assert ids[: len(kept)] == kept
    assert len(kept) <= len(head) + len(loop)
    assert truncate_repetition(kept) == kept


def test_what_is_said_three_times_or_does_not_last_is_no_loop():
    for ids in ([], [3], [7, 3, 3, 3], [1, 2] * 3, [5, 5, 5, 5, 5, 2], list(range(11))):
        assert truncate_repetition(ids) == ids
