"""`lessons.run`: which lessons there are, and what it leaves as it was."""

from pathlib import Path

import pytest
import torch

from qkv import lessons
from qkv.errors import DiskError, InputError

SOURCE = Path(lessons.__file__).parent
TESTS = Path(__file__).parent


def test_an_unknown_lesson_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"no lesson 'soft-dict' among the \d+; did you mean 'soft-dictionary'\?"):
        lessons.run("soft-dict", plot=None, seed=0)


def test_a_name_like_no_other_is_sent_to_the_list():
    with pytest.raises(InputError, match=r"no lesson '1234' among the \d+; `qkv lesson` lists them"):
        lessons.run("1234", plot=None, seed=0)


def test_a_picture_of_unknown_type_is_refused_before_anything_is_computed(capsys, tmp_path):
    with pytest.raises(InputError, match=r"a\.gif: the name must end in one of \.png \.svg \.pdf"):
        lessons.run("one-hot", plot=tmp_path / "a.gif", seed=0)
    assert capsys.readouterr().out == ""


def test_a_picture_that_cannot_be_saved_is_one_line(tmp_path, capsys):
    with pytest.raises(InputError, match=r"nowhere/a\.png: there is no folder .*nowhere"):
        lessons.run("one-hot", plot=tmp_path / "nowhere" / "a.png", seed=0)
    assert capsys.readouterr().out == ""
    (tmp_path / "a.png").mkdir()
    with pytest.raises(DiskError, match=r"a\.png: cannot be written: Is a directory"):
        lessons.run("one-hot", plot=tmp_path / "a.png", seed=0)


@pytest.mark.parametrize("suffix", [".svg", ".PDF"])
def test_pictures_come_in_other_types_too(capsys, tmp_path, suffix):
    lessons.run("soft-dictionary", plot=tmp_path / f"a{suffix}", seed=0)
    assert (tmp_path / f"a{suffix}").stat().st_size > 1000
    assert "picture saved" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["walkthrough", "heat-maps"])
def test_the_seed_alone_decides_the_numbers(capsys, name):
    texts = []
    for seed in (3, 3, 5):
        torch.manual_seed(len(texts))
        lessons.run(name, plot=None, seed=seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_lesson_leaves_chance_and_threads_as_they_were(capsys):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    n_threads = torch.get_num_threads()
    lessons.run("heat-maps", plot=None, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == n_threads


def test_every_lesson_of_the_catalogue_is_a_file_and_every_file_is_in_the_catalogue():
    files = {path.stem for path in SOURCE.glob("*.py") if "\ndef lesson(seed: int)" in path.read_text()}
    assert {info.module for info in lessons.LESSONS.values()} == files


def test_every_lesson_is_run_in_a_test():
    sources = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    assert [name for name in lessons.LESSONS if f'"{name}"' not in sources] == []


def test_run_gives_the_picture_of_what_it_computed(capsys):
    draw = lessons.run("one-hot")
    assert "one-hot" in capsys.readouterr().out
    assert draw()._repr_png_().startswith(b"\x89PNG")
