"""Listing, adding and unloading of models, and their summaries."""

import pytest

from qkv.serving import model_registry
from qkv.serving.explorer import Explorer
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.responses import RequestError
from qkv.zoo import shipped_model_folders
from tests.serving.explorer_client import FAMILIES, STACKS, TEXT, explorer, get_data, tasks
from tests.tasks.small_gpt import save_task
from tests.training.runs import build_cpu_trainer, prepare_small_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    prepared = prepare_small_run(tmp_path_factory.mktemp("run"), steps=4, save_every=2, eval_every=2)
    build_cpu_trainer(prepared).train()
    return prepared.run.path


def test_summaries_contain_tasks_and_views_of_every_family():
    listed = {model["id"]: model for model in get_data("/api/models")["models"]}
    assert set(listed) == set(FAMILIES)
    for family, model in listed.items():
        assert model["family"] == family
        assert [stack["stack"] for stack in model["stacks"]] == STACKS[family]
        assert model["n_parameters"] == sum(parameter.numel() for parameter in tasks()[family].model.parameters())
        assert model["error"] is None
        assert model["examples"]
    assert [model["second_text"] for model in listed.values()] == [None, "pair", "translation", "translation"]
    assert listed["bert"]["tasks"] == ["fill", "classify", "embed"]
    assert listed["rnn"]["views"] == ["heads", "head", "map", "compare", "lens", "embeddings", "translate", "cost"]


def test_shipped_models_are_listed_without_their_weights():
    registry = ModelRegistry()
    listed = registry.list_models()
    assert {model["id"] for model in listed["models"]} == set(shipped_model_folders())
    assert listed["default_model"] in shipped_model_folders()
    assert all(model["summary"] for model in listed["models"])
    assert all(loaded.task is None for loaded in registry._models.values())


def test_a_run_folder_has_checkpoints_and_a_timeline(run_folder):
    local = Explorer(ModelRegistry([run_folder], zoo=False))
    (model,) = get_data("/api/models", backend=local)["models"]
    steps = [checkpoint["step"] for checkpoint in model["checkpoints"]]
    assert len(steps) >= 2
    assert model["best_step"] in steps
    assert "timeline" in model["views"]
    runs = [
        get_data("/api/run", {"model": checkpoint["id"], "text": "the cat"}, backend=local)
        for checkpoint in model["checkpoints"]
    ]
    top_tokens = [run["predictions"][0]["top_tokens"] for run in runs]
    assert top_tokens[0] != top_tokens[-1]
    timeline = get_data("/api/timeline", {"model": str(run_folder), "text": "the cat"}, backend=local)
    assert timeline["steps"] == steps
    assert timeline["scores"].shape == (len(steps), 2, 2, 6)
    assert len(timeline["losses"]) == len(steps)
    with pytest.raises(RequestError, match="@99"):
        local.registry.find_or_register_checkpoint(f"{run_folder}@99")
    assert len(get_data("/api/models", backend=local)["models"]) == 1, "checkpoints must not be listed as models"


def test_a_timeline_requires_a_run_folder():
    response = explorer().handle_request("/api/timeline", {"model": "gpt", "text": TEXT})
    assert (response.status, b"gpt" in response.body) == (400, True)


def test_a_model_is_added_by_path(tmp_path):
    local = Explorer(ModelRegistry(zoo=False))
    assert get_data("/api/models", backend=local) == {"models": [], "default_model": None}
    folder = save_task(tasks()["gpt"], tmp_path / "mine")
    model = get_data("/api/models/add", {"path": str(folder)}, backend=local)
    assert (model["id"], model["name"], model["source"]) == (str(folder), "mine", "user")
    assert get_data("/api/run", {"model": model["id"], "text": TEXT}, backend=local)["sequence"]["ids"]


def test_a_folder_name_may_contain_an_at_sign(tmp_path):
    folder = str(save_task(tasks()["gpt"], tmp_path / "me@work"))
    assert [model["id"] for model in ModelRegistry([folder], zoo=False).list_models()["models"]] == [folder]


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5_000])
def test_an_invalid_path_is_not_found(path):
    response = explorer().handle_request("/api/models/add", {"path": path})
    assert response.status == 404


def test_an_invalid_model_is_listed_with_its_error(tmp_path):
    (tmp_path / "config.json").write_text('{"family": "gtp"}')
    (model,) = ModelRegistry([tmp_path], zoo=False).list_models()["models"]
    assert "'gtp'" in model["error"]


def with_context(task, context_length):
    config = task.model.config.model_copy(update={"context_length": context_length})
    return type(task)(type(task.model)(config, seed=0).eval(), task.tokenizer)


def test_examples_fit_the_context():
    for task in tasks().values():
        for context_length in (5, 11, 23, 37):
            local = Explorer(ModelRegistry(memory={"small": with_context(task, context_length)}, zoo=False))
            (model,) = get_data("/api/models", backend=local)["models"]
            for example in model["examples"]:
                runs = get_data("/api/run", {"model": "small", "text": example["text"]}, backend=local)
                assert len((runs["source"] or runs["sequence"])["ids"]) < context_length
                assert context_length > 11 or f"{context_length} tokens" in example["description"]


def test_models_are_listed_in_the_order_of_the_arguments(tmp_path):
    mine = str(save_task(tasks()["gpt"], tmp_path / "mine"))
    for names in (["stories", mine], [mine, "stories"]):
        listed = ModelRegistry(names).list_models()
        assert [model["id"] for model in listed["models"]][:2] == names
        assert listed["default_model"] == names[0]


def test_the_least_recently_used_weights_are_released(tmp_path, monkeypatch):
    monkeypatch.setattr(model_registry, "MAX_LOADED_MODELS", 2)
    folders = [save_task(tasks()["gpt"], tmp_path / name) for name in "abc"]
    registry = ModelRegistry(folders, zoo=False)
    for folder in folders:
        registry.get_or_load_task(registry.find_or_register_checkpoint(str(folder)))
    assert [registry.find_or_register_checkpoint(str(folder)).task is None for folder in folders] == [
        True,
        False,
        False,
    ]
