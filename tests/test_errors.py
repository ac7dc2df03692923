"""Error messages are single lines of limited length."""

from qkv.errors import MAX_MESSAGE_CHARACTERS, InputError


def test_line_breaks_are_removed_and_long_messages_are_shortened():
    assert str(InputError("a.csv: the label 'x\ny\r\nz'")) == "a.csv: the label 'x y z'"
    long = str(InputError("a.json: " + "x" * 10_000 + ": must be a number"))
    assert len(long) <= MAX_MESSAGE_CHARACTERS
    assert long.startswith("a.json: xxx")
    assert long.endswith("xxx: must be a number")
