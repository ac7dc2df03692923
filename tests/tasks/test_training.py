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
    told = []
    made = qkv.train(recipe(steps=3), tmp_path / "run", data=tmp_path, device="cpu", report=told.append)
    assert [entry["step"] for entry in told if "loss" in entry] == [1, 2, 3]
    return made


def test_a_run_from_python_ends_in_a_model_that_answers(run):
    assert isinstance(qkv.load(run).generate("a", max_new=2, seed=1), str)


def test_the_same_recipe_in_the_same_folder_goes_on_and_has_nothing_left_to_do(run):
    told = []
    assert qkv.train(recipe(steps=3), run, data=run.parent, device="cpu", report=told.append) == run
    assert told == []


def test_another_recipe_does_not_go_on_with_a_run(run):
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(recipe(steps=4), run, data=run.parent, device="cpu")


def test_a_device_that_is_none_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"--device gpu: .*cpu, cuda, auto"):
        qkv.train(recipe(steps=3), tmp_path / "run", data=tmp_path, device="gpu")
    assert not (tmp_path / "run").exists()


def test_a_text_is_enough_and_the_time_it_may_take(tmp_path):
    write_text(tmp_path / "book.txt")
    run = qkv.train(tmp_path / "book.txt", tmp_path / "run", minutes=0.02, device="cpu")
    recipe = open_run(run).recipe
    assert (recipe.family, recipe.data.train) == ("gpt", (str(tmp_path / "book.txt"),))
    assert RunFolder(run).checkpoint_steps()[-1] == recipe.training.steps
    told = []
    assert qkv.train(tmp_path / "book.txt", run, minutes=0.02, device="cpu", report=told.append) == run
    assert told == []
    write_text(tmp_path / "other.txt")
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(tmp_path / "other.txt", run, minutes=0.02, device="cpu")


def test_a_text_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"none\.txt: "):
        qkv.train(tmp_path / "none.txt", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_recipe_can_be_given_a_time_and_then_goes_on_with_a_run_of_its_own_alone(tmp_path):
    write_text(tmp_path / "text.txt")
    given = {"minutes": 0.01, "data": tmp_path, "device": "cpu"}
    run = qkv.train(recipe(steps=3), tmp_path / "run", **given)
    assert open_run(run).recipe.training.steps >= 20
    told = []
    assert qkv.train(recipe(steps=3), run, **given, report=told.append) == run
    assert told == []
    other = recipe(steps=3)
    other = other.replace(training=other.training.replace(learning_rate=0.5))
    with pytest.raises(RunError, match=r"recipe.*--resume"):
        qkv.train(other, run, **given)


def test_nobody_else_can_train_there_while_the_steps_are_fitted(tmp_path, monkeypatch):
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


def test_a_time_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"minutes=-1\.0.*\b0$"):
        qkv.train(recipe(steps=3), tmp_path / "run", minutes=-1.0, data=tmp_path, device="cpu")
