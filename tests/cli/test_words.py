"""`qkv words`: each word with its nearest, by cosine; a map where one is asked for."""

import json
from functools import partial

import pytest

from qkv.tasks import LanguageModel, load_as
from qkv.tasks.word_vectors import word_vectors
from tests.tasks.small_gpt import saved, small_task

ITEMS = ["cat", "dog", "the [cat] sat", "mat"]


@pytest.fixture
def command(command):
    return partial(command, "words")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_task(), tmp_path_factory.mktemp("model") / "small")


def test_each_word_has_its_nearest_other_by_cosine(command, folder):
    found = word_vectors(load_as(LanguageModel, folder), ITEMS)
    for place, line in enumerate(command(folder, *ITEMS).out.splitlines()):
        item, near, cosine, distance = line.split("\t")
        others = {other: found.cosine[place, other].item() for other in range(4) if other != place}
        best = max(others, key=others.__getitem__)
        assert (item, near, cosine) == (ITEMS[place], ITEMS[best], f"{others[best]:.4f}")
        assert distance == f"{found.euclidean[place, best].item():.4f}"
    said = [json.loads(line) for line in command(folder, *ITEMS, "--json").out.splitlines()]
    assert [one["contextual"] for one in said] == [False, False, True, False]
    assert said[1]["cosine"] == pytest.approx(found.cosine[1].tolist(), abs=1e-6)


def test_a_word_in_a_sentence_of_two_lines_has_one_line(command, folder):
    first, _ = command(folder, "the\n[cat] sat", "dog").out.splitlines()
    assert first.startswith("the\\n[cat] sat\tdog\t")


def test_a_map_is_drawn(command, folder, tmp_path):
    assert command(folder, *ITEMS, "--plot", tmp_path / "map.png").status == 0
    assert (tmp_path / "map.png").stat().st_size > 5000


def test_mistakes_are_one_line(command, folder, tmp_path):
    for arguments, line in [
        ([folder, "cat"], "words given: 1; at least 2 can be compared"),
        ([folder, "cat", "dog", "--plot", tmp_path / "no" / "a.png"], "a.png: there is no folder"),
        ([folder, "cat", "dog", "--plot", tmp_path / "a.gif"], "a.gif: the name must end in one of .png .svg .pdf"),
    ]:
        answer = command(*arguments)
        assert answer.status == 2
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1


def test_help_has_an_example(command):
    assert "qkv words " in command("--help").out.split("Examples:")[1]
