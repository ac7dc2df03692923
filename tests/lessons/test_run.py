"""`lessons.run`: the catalog, errors, and what it leaves unchanged."""

from pathlib import Path

import pytest
import torch

from qkv import lessons
from qkv.errors import DiskError, InputError

SOURCE = Path(lessons.__file__).parent
TESTS = Path(__file__).parent


def test_an_unknown_lesson_is_rejected_with_the_nearest_name():
    with pytest.raises(InputError, match=r"'soft-dict'.*soft-dictionary"):
        lessons.run("soft-dict", plot=None, seed=0)


def test_an_unknown_name_without_similar_names_refers_to_the_list():
    with pytest.raises(InputError, match=r"'1234'.*`qkv lesson`"):
        lessons.run("1234", plot=None, seed=0)


def test_a_figure_of_unknown_type_is_rejected_before_anything_is_computed(capsys, tmp_path):
    with pytest.raises(InputError, match=r"a\.gif.*\.png.*\.svg.*\.pdf"):
        lessons.run("one-hot", plot=tmp_path / "a.gif", seed=0)
    assert capsys.readouterr().out == ""


def test_a_figure_that_cannot_be_saved_is_reported(tmp_path, capsys):
    with pytest.raises(InputError, match=r"nowhere"):
        lessons.run("one-hot", plot=tmp_path / "nowhere" / "a.png", seed=0)
    assert capsys.readouterr().out == ""
    (tmp_path / "a.png").mkdir()
    with pytest.raises(DiskError, match=r"a\.png.*Is a directory"):
        lessons.run("one-hot", plot=tmp_path / "a.png", seed=0)


@pytest.mark.parametrize("suffix", [".svg", ".PDF"])
def test_figures_can_be_svg_or_pdf(capsys, tmp_path, suffix):
    lessons.run("soft-dictionary", plot=tmp_path / f"a{suffix}", seed=0)
    assert (tmp_path / f"a{suffix}").stat().st_size > 1000
    assert f"a{suffix}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["walkthrough", "heat-maps"])
def test_the_numbers_depend_only_on_the_seed(capsys, name):
    texts = []
    for seed in (3, 3, 5):
        torch.manual_seed(len(texts))
        lessons.run(name, plot=None, seed=seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_lesson_does_not_change_the_random_state_or_threads(capsys):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    n_threads = torch.get_num_threads()
    lessons.run("heat-maps", plot=None, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == n_threads


def test_every_lesson_of_the_catalog_is_a_file_and_every_file_is_in_the_catalog():
    files = {path.stem for path in SOURCE.glob("*.py") if "\ndef lesson(seed: int)" in path.read_text()}
    assert {info.module for info in lessons.LESSONS.values()} == files


def test_every_lesson_is_run_in_a_test():
    sources = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    assert [name for name in lessons.LESSONS if f'"{name}"' not in sources] == []


def test_run_returns_a_function_that_draws_the_figure(capsys):
    draw = lessons.run("one-hot")
    assert "one-hot" in capsys.readouterr().out
    assert draw()._repr_png_().startswith(b"\x89PNG")
