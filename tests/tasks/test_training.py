"""`qkv.train`: training from Python."""

import pytest

import qkv
from qkv.errors import InputError, RunError
from qkv.tasks import training
from qkv.training import RunFolder, open_run
from tests.training.runs import recipe, write_text


@pytest.fixture
def run(tmp_path):
    write_text(tmp_path / "text.txt")
    entries = []
    path = qkv.train(recipe(steps=3), tmp_path / "run", data=tmp_path, device="cpu", report=entries.append)
    assert [entry["step"] for entry in entries if "loss" in entry] == [1, 2, 3]
    return path


def test_a_trained_model_generates(run):
    assert isinstance(qkv.load(run).generate("a", max_new=2, seed=1), str)


def test_a_finished_run_is_not_trained_again(run):
    entries = []
    assert qkv.train(recipe(steps=3), run, data=run.parent, device="cpu", report=entries.append) == run
    assert entries == []


def test_a_run_with_another_recipe_raises(run):
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(recipe(steps=4), run, data=run.parent, device="cpu")


def test_an_invalid_device_raises_before_writing(tmp_path):
    with pytest.raises(InputError, match=r"--device gpu: .*cpu, cuda, auto"):
        qkv.train(recipe(steps=3), tmp_path / "run", data=tmp_path, device="gpu")
    assert not (tmp_path / "run").exists()


def test_training_on_a_text_with_a_time_limit(tmp_path):
    write_text(tmp_path / "book.txt")
    run = qkv.train(tmp_path / "book.txt", tmp_path / "run", minutes=0.02, device="cpu")
    recipe = open_run(run).recipe
    assert (recipe.family, recipe.data.train) == ("gpt", (str(tmp_path / "book.txt"),))
    assert RunFolder(run).checkpoint_steps()[-1] == recipe.training.steps
    entries = []
    assert qkv.train(tmp_path / "book.txt", run, minutes=0.02, device="cpu", report=entries.append) == run
    assert entries == []
    write_text(tmp_path / "other.txt")
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(tmp_path / "other.txt", run, minutes=0.02, device="cpu")


def test_a_missing_text_raises_before_writing(tmp_path):
    with pytest.raises(InputError, match=r"none\.txt: "):
        qkv.train(tmp_path / "none.txt", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_timed_recipe_only_resumes_its_own_run(tmp_path):
    write_text(tmp_path / "text.txt")
    options = {"minutes": 0.01, "data": tmp_path, "device": "cpu"}
    run = qkv.train(recipe(steps=3), tmp_path / "run", **options)
    assert open_run(run).recipe.training.steps >= 20
    entries = []
    assert qkv.train(recipe(steps=3), run, **options, report=entries.append) == run
    assert entries == []
    other = recipe(steps=3)
    other = other.replace(training=other.training.replace(learning_rate=0.5))
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(other, run, **options)


def test_the_run_is_locked_while_the_steps_are_fitted(tmp_path, monkeypatch):
    fitted = []

    def fit(prepared, **_named):
        with pytest.raises(RunError, match="process"), prepared.run.locked():
            pass
        fitted.append(prepared.run.path)
        return prepared

    monkeypatch.setattr(training, "fit_run_to_time", fit)
    write_text(tmp_path / "text.txt")
    qkv.train(recipe(steps=3), tmp_path / "run", minutes=0.01, data=tmp_path, device="cpu")
    assert fitted == [tmp_path / "run"]


def test_a_negative_time_raises(tmp_path):
    with pytest.raises(InputError, match=r"minutes .*\b0, got -1\.0$"):
        qkv.train(recipe(steps=3), tmp_path / "run", minutes=-1.0, data=tmp_path, device="cpu")
