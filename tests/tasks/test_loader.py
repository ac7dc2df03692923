"""Models are loaded by shipped name, folder, file or hub name."""

import pytest
import torch

import qkv
from qkv.errors import InputError
from qkv.tasks import load, load_pretrained, resolve_or_download_model_folder
from qkv.tasks.loader import locate_or_download_checkpoint
from qkv.weights.gguf_file import write_gguf
from qkv.weights.save import save_hf, save_native_int8
from qkv.zoo import read_model_card, shipped_model_folders
from tests.weights.loaded_models import assert_same_weights, random_model


def test_qkv_load_loads_a_shipped_model():
    text = qkv.load("stories").generate("Once upon a time", temperature=0.0, max_new=12)
    assert text == ", there was a little girl named Lily. She loved to"


@pytest.mark.parametrize("name", shipped_model_folders())
def test_a_shipped_model_matches_its_card(name):
    card, loaded = read_model_card(shipped_model_folders()[name]), load_pretrained(name)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == card.parameters
    assert all(bool(torch.isfinite(parameter).all()) for parameter in loaded.model.parameters())
    assert loaded.tokenizer is not None
    assert (card.folder / "model.safetensors").stat().st_size <= 12 * 2**20
    assert card.scores


@pytest.mark.parametrize(("name", "hint"), [("storys", "'stories'"), ("Stories", "'stories'"), ("zzz", "")])
def test_an_unknown_name_suggests_the_closest_shipped_model(name, hint):
    with pytest.raises(InputError) as raised:
        load(name)
    assert str(raised.value).startswith(f"{name}: ")
    assert hint in str(raised.value)
    assert ("did you mean" in str(raised.value)) == bool(hint)


@pytest.mark.parametrize("save", [save_hf, save_native_int8])
def test_a_folder_is_loaded_by_its_path(save, tmp_path):
    save(random_model("gpt2"), tmp_path / "model")
    assert resolve_or_download_model_folder(tmp_path / "model") == tmp_path / "model"
    load(str(tmp_path / "model"))


def test_a_local_model_takes_precedence_over_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert locate_or_download_checkpoint("stories") == shipped_model_folders()["stories"]
    (tmp_path / "stories").rmdir()
    save_hf(random_model("gpt2"), tmp_path / "stories")
    assert locate_or_download_checkpoint("stories").resolve() == tmp_path / "stories"


def test_a_file_format_is_detected_by_its_first_bytes(tmp_path):
    pytest.importorskip("gguf", reason="the extra `formats` is not installed")
    loaded = random_model("gpt2")
    write_gguf(loaded, tmp_path / "model.anything")
    again = load_pretrained(tmp_path / "model.anything")
    write_gguf(again, tmp_path / "again.gguf")
    assert_same_weights(again, load_pretrained(tmp_path / "again.gguf"))
    with pytest.raises(InputError, match=r"model\.anything: .*config\.json"):
        resolve_or_download_model_folder(tmp_path / "model.anything")


def test_an_empty_folder_raises(tmp_path):
    with pytest.raises(InputError, match=r"\(config\.json\).*\(checkpoints/\)"):
        load(tmp_path)


def test_a_name_with_one_slash_is_downloaded_from_the_hub(monkeypatch, tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "model")
    names = []
    monkeypatch.setattr(
        "qkv.weights.hub.download_safetensors_snapshot", lambda name: names.append(name) or tmp_path / "model"
    )
    load("org/some-model.v2")
    assert names == ["org/some-model.v2"]
    for path in ("./a/b", "a/b/c", "/a/b", "../b", "a/"):
        with pytest.raises(InputError, match="shipped model"):
            load(path)
    assert len(names) == 1
