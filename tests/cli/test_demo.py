"""`qkv demo`: each shipped model shows what it does, then the explorer is served."""

import shlex
import sys

from qkv.cli.demo import SHOWN


def test_every_kind_of_model_says_what_its_command_prints(command):
    answer = command("demo", "--no-serve")
    assert (answer.status, answer.err) == (0, "")
    parts = answer.out.strip().split("\n\n")
    assert [part.splitlines()[1] for part in parts] == [f"$ qkv {line}" for _, line in SHOWN]
    for part, (_, line) in zip(parts, SHOWN, strict=True):
        assert " ".join(part.splitlines()[2:]).split() == command(*shlex.split(line)).out.split(), line
    story, translation, filled, classified, cost = parts
    assert story.splitlines()[2].startswith("    One day, a robot found a flower.")
    assert "The white house is near the river." in translation
    assert "She opened the door and went outside." in filled
    assert classified.splitlines()[2].startswith("    positive")
    assert "124M parameters" in cost


def test_the_explorer_comes_last(command, monkeypatch):
    served = []
    monkeypatch.setattr(sys.modules["qkv.cli.demo"], "printed_by", lambda line: served.append(line) or "")
    monkeypatch.setattr(
        sys.modules["qkv.cli.explore"], "explore", lambda models, **options: served.append((models, options))
    )
    assert command("demo", "--port", "9001", "--no-browser").status == 0
    assert served == [*(line for _, line in SHOWN), (None, {"port": 9001, "no_browser": True})]
