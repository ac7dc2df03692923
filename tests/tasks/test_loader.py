"""MODEL, as every command takes it: which model is meant, and what is said where none is."""

import pytest
import torch

import qkv
from qkv.errors import InputError
from qkv.tasks import load, load_pretrained, resolve_model_folder
from qkv.tasks.loader import resolve_model_path
from qkv.weights.gguf_file import write_gguf
from qkv.weights.save import save_hf, save_int8
from qkv.zoo import read_card, shipped
from tests.weights.loaded_models import assert_same_weights, random_model


def test_the_front_door_loads_a_shipped_model_that_tells_a_story():
    told = qkv.load("stories").generate("Once upon a time", temperature=0.0, max_new=12)
    assert told == ", there was a little girl named Lily. She loved to"


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_model_is_what_its_card_says(name):
    card, loaded = read_card(shipped()[name]), load_pretrained(name)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == card.parameters
    assert all(bool(torch.isfinite(parameter).all()) for parameter in loaded.model.parameters())
    assert loaded.tokenizer is not None
    assert (card.folder / "model.safetensors").stat().st_size <= 12 * 2**20
    assert card.scores


@pytest.mark.parametrize(
    ("name", "hint"), [("storys", "; did you mean 'stories'?"), ("Stories", "; did you mean 'stories'?"), ("zzz", "")]
)
def test_a_name_that_is_nothing_gives_the_nearest_shipped_one(name, hint):
    with pytest.raises(InputError) as raised:
        load(name)
    assert str(raised.value) == f"{name}: there is no such folder or file, nor a shipped model of that name{hint}"


@pytest.mark.parametrize("save", [save_hf, save_int8])
def test_a_folder_is_found_by_its_path(save, tmp_path):
    save(random_model("gpt2"), tmp_path / "model")
    assert resolve_model_folder(tmp_path / "model") == tmp_path / "model"
    load(str(tmp_path / "model"))


def test_a_folder_here_with_a_shipped_name_is_meant_where_it_holds_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert resolve_model_path("stories") == shipped()["stories"]
    (tmp_path / "stories").rmdir()
    save_hf(random_model("gpt2"), tmp_path / "stories")
    assert resolve_model_path("stories").resolve() == tmp_path / "stories"


def test_a_file_is_loaded_by_its_first_bytes(tmp_path):
    pytest.importorskip("gguf", reason="the extra `formats` is not installed")
    loaded = random_model("gpt2")
    write_gguf(loaded, tmp_path / "model.anything")
    again = load_pretrained(tmp_path / "model.anything")
    write_gguf(again, tmp_path / "again.gguf")
    assert_same_weights(again, load_pretrained(tmp_path / "again.gguf"))
    with pytest.raises(InputError, match=r"model\.anything: .*config\.json"):
        resolve_model_folder(tmp_path / "model.anything")


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(InputError, match=r"\(config\.json\).*\(checkpoints/\)"):
        load(tmp_path)


def test_a_name_with_one_slash_is_asked_of_the_hub(monkeypatch, tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "model")
    asked = []
    monkeypatch.setattr("qkv.tasks.loader.download", lambda name: asked.append(name) or tmp_path / "model")
    load("org/some-model.v2")
    assert asked == ["org/some-model.v2"]
    for path in ("./a/b", "a/b/c", "/a/b", "../b", "a/"):
        with pytest.raises(InputError, match="shipped model"):
            load(path)
    assert len(asked) == 1
