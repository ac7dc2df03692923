"""A stop string ends a text wherever its pieces are parted, and no piece of it is ever shown."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import InputError
from qkv.generation import StopStrings

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
