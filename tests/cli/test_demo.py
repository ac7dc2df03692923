"""`qkv demo`: the output of each command, then the explorer."""

import shlex
import sys

from qkv.cli.demo import DEMO_COMMANDS


def test_each_command_is_printed_with_its_output(command):
    answer = command("demo", "--no-serve")
    assert (answer.status, answer.err) == (0, "")
    parts = answer.out.strip().split("\n\n")
    assert [part.splitlines()[1] for part in parts] == [f"$ qkv {line}" for _, line in DEMO_COMMANDS]
    for part, (_, line) in zip(parts, DEMO_COMMANDS, strict=True):
        assert " ".join(part.splitlines()[2:]).split() == command(*shlex.split(line)).out.split(), line
    story, translation, filled, classified, cost = parts
    assert story.splitlines()[2].startswith("    One day, a robot found a flower.")
    assert "The white house is near the river." in translation
    assert "She opened the door and went outside." in filled
    assert classified.splitlines()[2].startswith("    positive")
    assert "124M parameters" in cost


def test_the_explorer_is_served_last(command, monkeypatch):
    calls = []
    monkeypatch.setattr(sys.modules["qkv.cli.demo"], "capture_qkv_output", lambda line: calls.append(line) or "")
    monkeypatch.setattr(
        sys.modules["qkv.cli.explore"], "explore", lambda models, **options: calls.append((models, options))
    )
    assert command("demo", "--port", "9001", "--no-browser").status == 0
    assert calls == [*(line for _, line in DEMO_COMMANDS), (None, {"port": 9001, "no_browser": True})]
