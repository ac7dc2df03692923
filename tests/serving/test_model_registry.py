"""Which models are there, and what is said of them."""

import pytest

from qkv.serving import model_registry as shelves
from qkv.serving.responses import RefusedError
from qkv.serving.explorer import Explorer
from qkv.serving.model_registry import ModelRegistry
from qkv.zoo import shipped
from tests.serving.explorer_client import FAMILIES, STACKS, TEXT, asked, explorer, tasks
from tests.tasks.small_gpt import saved
from tests.training.runs import make_ready, trainer_of


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    prepared = make_ready(tmp_path_factory.mktemp("run"), steps=4, save_every=2, eval_every=2)
    trainer_of(prepared).train()
    return prepared.run.path


def test_each_family_says_what_it_can_do():
    listed = {model["id"]: model for model in asked("/api/models")["models"]}
    assert set(listed) == set(FAMILIES)
    for family, model in listed.items():
        assert model["family"] == family
        assert [stack["stack"] for stack in model["stacks"]] == STACKS[family]
        assert model["parameters"] == sum(one.numel() for one in tasks()[family].model.parameters())
        assert model["error"] is None
        assert model["examples"]
    assert [model["takes_second"] for model in listed.values()] == [None, "pair", "translation", "translation"]
    assert listed["bert"]["tasks"] == ["fill", "classify", "embed"]
    assert listed["rnn"]["views"] == ["heads", "head", "map", "compare", "lens", "embeddings", "translate", "cost"]


def test_shipped_models_are_listed_without_their_weights():
    shelf = ModelRegistry()
    listed = shelf.listed()
    assert {model["id"] for model in listed["models"]} == set(shipped())
    assert listed["first"] in shipped()
    assert all(model["summary"] for model in listed["models"])
    assert all(one.task is None for one in shelf._open.values())


def test_a_run_has_its_checkpoints_and_a_time_line(run_folder):
    own = Explorer(ModelRegistry([run_folder], zoo=False))
    (model,) = asked("/api/models", of=own)["models"]
    steps = [one["step"] for one in model["checkpoints"]]
    assert len(steps) >= 2
    assert model["best"] in steps
    assert "timeline" in model["views"]
    told = [asked("/api/run", {"model": one["id"], "text": "the cat"}, of=own) for one in model["checkpoints"]]
    guesses = [one["predictions"][0]["guesses"] for one in told]
    assert guesses[0] != guesses[-1]
    line = asked("/api/timeline", {"model": str(run_folder), "text": "the cat"}, of=own)
    assert line["steps"] == steps
    assert line["scores"].shape == (len(steps), 2, 2, 6)
    assert len(line["losses"]) == len(steps)
    with pytest.raises(RefusedError, match="no checkpoint of step 99"):
        own.shelf.find(f"{run_folder}@99")
    assert len(asked("/api/models", of=own)["models"]) == 1, "checkpoints are listed with their run alone"


def test_a_time_line_needs_a_run():
    answer = explorer().ask("/api/timeline", {"model": "gpt", "text": TEXT})
    assert (answer.status, b"no run with checkpoints" in answer.body) == (400, True)


def test_a_model_is_added_by_its_path(tmp_path):
    own = Explorer(ModelRegistry(zoo=False))
    assert asked("/api/models", of=own) == {"models": [], "first": None}
    folder = saved(tasks()["gpt"], tmp_path / "mine")
    model = asked("/api/models/add", {"path": str(folder)}, of=own)
    assert (model["id"], model["name"], model["source"]) == (str(folder), "mine", "given")
    assert asked("/api/run", {"model": model["id"], "text": TEXT}, of=own)["own"]["ids"]


def test_a_folder_with_an_at_sign_is_listed_as_any_other(tmp_path):
    folder = str(saved(tasks()["gpt"], tmp_path / "me@work"))
    assert [model["id"] for model in ModelRegistry([folder], zoo=False).listed()["models"]] == [folder]


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5_000])
def test_what_is_no_path_is_told_in_words(path):
    answer = explorer().ask("/api/models/add", {"path": path})
    assert (answer.status, b"no such folder or file" in answer.body) == (404, True)


def test_a_folder_that_is_no_model_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"family": "gtp"}')
    (model,) = ModelRegistry([tmp_path], zoo=False).listed()["models"]
    assert "unknown family 'gtp'" in model["error"]


def with_context(task, room):
    config = task.model.config.model_copy(update={"context_length": room})
    return type(task)(type(task.model)(config, seed=0).eval(), task.tokenizer)


def test_examples_fit_the_context():
    for task in tasks().values():
        for room in (5, 11, 23, 37):
            own = Explorer(ModelRegistry(memory={"small": with_context(task, room)}, zoo=False))
            (model,) = asked("/api/models", of=own)["models"]
            for example in model["examples"]:
                told = asked("/api/run", {"model": "small", "text": example["text"]}, of=own)
                assert len((told["source"] or told["own"])["ids"]) < room
                assert room > 11 or "(cut to fit" in example["about"]


def test_models_are_listed_in_the_order_they_were_given(tmp_path):
    mine = str(saved(tasks()["gpt"], tmp_path / "mine"))
    for given in (["stories", mine], [mine, "stories"]):
        listed = ModelRegistry(given).listed()
        assert [model["id"] for model in listed["models"]][:2] == given
        assert listed["first"] == given[0]


def test_only_so_many_models_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(shelves, "MOST_LOADED", 2)
    folders = [saved(tasks()["gpt"], tmp_path / name) for name in "abc"]
    shelf = ModelRegistry(folders, zoo=False)
    for folder in folders:
        shelf.task(shelf.find(str(folder)))
    assert [shelf.find(str(folder)).task is None for folder in folders] == [True, False, False]
