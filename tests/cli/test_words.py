"""`qkv words`: the nearest word of each word, and the map."""

import json
from functools import partial

import pytest

from qkv.tasks import LanguageModel, load_as
from qkv.tasks.word_vectors import word_vectors
from tests.cli.answers import assert_only_error
from tests.tasks.small_gpt import save_task, small_gpt

ITEMS = ["cat", "dog", "the [cat] sat", "mat"]


@pytest.fixture
def command(command):
    return partial(command, "words")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(small_gpt(), tmp_path_factory.mktemp("model") / "small")


def test_the_nearest_other_word_by_cosine_is_printed(command, folder):
    vectors = word_vectors(load_as(LanguageModel, folder), ITEMS)
    for i, line in enumerate(command(folder, *ITEMS).out.splitlines()):
        item, near, cosine, distance = line.split("\t")
        others = {other: vectors.cosine[i, other].item() for other in range(4) if other != i}
        best = max(others, key=others.__getitem__)
        assert (item, near, cosine) == (ITEMS[i], ITEMS[best], f"{others[best]:.4f}")
        assert distance == f"{vectors.euclidean[i, best].item():.4f}"
    results = [json.loads(line) for line in command(folder, *ITEMS, "--json").out.splitlines()]
    assert [result["contextual"] for result in results] == [False, False, True, False]
    assert results[1]["cosine"] == pytest.approx(vectors.cosine[1].tolist(), abs=1e-6)


def test_line_breaks_are_escaped(command, folder):
    first, _ = command(folder, "the\n[cat] sat", "dog").out.splitlines()
    assert first.startswith("the\\n[cat] sat\tdog\t")


def test_a_map_is_plotted(command, folder, tmp_path):
    assert command(folder, *ITEMS, "--plot", tmp_path / "map.png").status == 0
    assert (tmp_path / "map.png").stat().st_size > 5000


def test_invalid_input_is_reported_in_one_line(command, folder, tmp_path):
    for arguments, parts in [
        ([folder, "cat"], ["2", "1"]),
        ([folder, "cat", "dog", "--plot", tmp_path / "no" / "a.png"], ["a.png: "]),
        ([folder, "cat", "dog", "--plot", tmp_path / "a.gif"], ["a.gif: ", ".png"]),
    ]:
        assert_only_error(command(*arguments), *parts)


def test_help_has_an_example(command):
    assert "qkv words " in command("--help").out.split("Examples:")[1]
