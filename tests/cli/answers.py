"""Assertions on the answer of a command."""


def assert_error(answer, *parts, status=2):
    """Nothing on standard output, and a last line of standard error that is an error with all of these parts.

    The parts are flags, values, names and numbers, so that the wording of messages can change.
    """
    assert (answer.status, answer.out) == (status, "")
    line = answer.err.splitlines()[-1]
    assert line.startswith("qkv: error: ")
    assert [part for part in parts if str(part) not in line] == [], line
    assert "Traceback" not in answer.err


def assert_only_error(answer, *parts, status=2):
    """As `assert_error`, with no other line on standard error."""
    assert_error(answer, *parts, status=status)
    assert len(answer.err.splitlines()) == 1
