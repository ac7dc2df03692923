"""What an error says is one line that can be read, whatever a file held."""

from qkv.errors import MOST_CHARACTERS, InputError


def test_a_message_is_one_line_of_a_length_that_can_be_read():
    assert str(InputError("a.csv: the label 'x\ny\r\nz'")) == "a.csv: the label 'x y z'"
    long = str(InputError("a.json: " + "x" * 10_000 + ": must be a number"))
    assert len(long) <= MOST_CHARACTERS
    assert long.startswith("a.json: xxx")
    assert long.endswith("xxx: must be a number")
