"""`qkv demo`: each shipped model shows what it does, then the explorer is served."""

import sys


def test_every_kind_of_model_says_something(command):
    answer = command("demo", "--no-serve")
    assert (answer.status, answer.err) == (0, "")
    story, translation, filled, classified, cost = answer.out.strip().split("\n\n")
    assert story.splitlines()[2].startswith("    One day, a robot found a flower.")
    assert "white ← blanca   house ← casa" in translation.splitlines()[3]
    assert "She opened the door and went outside.   (door 8" in filled
    assert classified.splitlines()[-1].startswith("    positive, 9")
    assert "    124,439,808 parameters; one training step on 8 texts" in cost
    for part in (story, translation, filled, classified, cost):
        assert part.splitlines()[1].startswith("$ qkv ")


def test_the_explorer_comes_last(command, monkeypatch):
    served = []
    for show in ("_story", "_translation", "_filled", "_classified", "_cost"):
        monkeypatch.setattr(sys.modules["qkv.cli.demo"], show, lambda: served.append(None))
    monkeypatch.setattr(
        sys.modules["qkv.cli.explore"], "explore", lambda models, **options: served.append((models, options))
    )
    assert command("demo", "--port", "9001", "--no-browser").status == 0
    assert served == [None] * 5 + [(None, {"port": 9001, "no_browser": True})]
