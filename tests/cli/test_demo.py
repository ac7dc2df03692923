"""`qkv demo`: each shipped model shows what it does, then the explorer is served."""

import shlex
import sys

import pytest

from qkv.cli.demo import SHOWN


@pytest.fixture(scope="module")
def printed():
    """What the demo prints below each command."""
    return {}


def test_every_kind_of_model_says_something(command, printed):
    answer = command("demo", "--no-serve")
    assert (answer.status, answer.err) == (0, "")
    parts = answer.out.strip().split("\n\n")
    assert [part.splitlines()[1] for part in parts] == [f"$ qkv {line}" for _, line in SHOWN]
    printed |= {part.splitlines()[1]: part.splitlines()[2:] for part in parts}
    story, translation, filled, classified, cost = parts
    assert story.splitlines()[2].startswith("    One day, a robot found a flower.")
    assert "The white house is near the river." in translation
    assert "She opened the door and went outside." in filled
    assert classified.splitlines()[2].startswith("    positive")
    assert "124M parameters" in cost


@pytest.mark.parametrize("line", [line for _, line in SHOWN])
def test_what_is_shown_is_what_the_command_prints(command, printed, line):

    words = " ".join(command(*shlex.split(line)).out.split())
    assert " ".join(" ".join(printed[f"$ qkv {line}"]).split()) == words


def test_the_explorer_comes_last(command, monkeypatch):
    served = []
    monkeypatch.setattr(sys.modules["qkv.cli.demo"], "printed_by", lambda line: served.append(line) or "")
    monkeypatch.setattr(
        sys.modules["qkv.cli.explore"], "explore", lambda models, **options: served.append((models, options))
    )
    assert command("demo", "--port", "9001", "--no-browser").status == 0
    assert served == [*(line for _, line in SHOWN), (None, {"port": 9001, "no_browser": True})]
