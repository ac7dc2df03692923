"""Incomplete, unsupported and unsafe model folders are rejected with a single-line error."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from qkv.errors import ConfigError, InputError, WeightsError
from qkv.weights.checkpoint_folder import read_safetensors
from qkv.weights.model_loader import load_model, require_tokenizer
from qkv.weights.save import save_hf, save_native_int8
from tests.weights.loaded_models import byte_level_tokenizer, random_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of two shards."""
    save_hf(random_model("gpt2"), tmp_path / "model")
    tensors = read_safetensors(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(index.values())):
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, tmp_path / "model" / shard)
    write_index(tmp_path / "model", index)
    return tmp_path / "model"


def write_index(folder, index):
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def read_index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def change_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_shards_are_combined(folder):
    assert torch.equal(
        load_model(folder).model.state_dict()["final_norm.weight"],
        random_model("gpt2").model.state_dict()["final_norm.weight"],
    )


def test_the_error_names_a_missing_shard(folder):
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"part-1\.safetensors: .*No such file"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../part-0.safetensors", "/etc/passwd", "in/side.safetensors"])
def test_shards_outside_of_the_folder_are_rejected(folder, shard):
    shutil.copy(folder / "part-0.safetensors", folder.parent / "part-0.safetensors")
    first, *_ = index = read_index(folder)
    write_index(folder, {**index, first: shard})
    with pytest.raises(WeightsError, match=rf"index\.json: .*'{shard}'"):
        load_model(folder)


def test_an_index_with_other_tensors_is_rejected(folder):
    index = read_index(folder)
    write_index(folder, {**index, "more": "part-0.safetensors"})
    with pytest.raises(WeightsError, match=rf"\b{len(index) + 1} tensors.*\b{len(index)}\b.*\bmore\b"):
        load_model(folder)


@pytest.mark.parametrize("index", [[], {"a": 1}, None])
def test_an_invalid_index_is_rejected(folder, index):
    write_index(folder, index)
    with pytest.raises(WeightsError, match="weight_map"):
        load_model(folder)


@pytest.mark.parametrize("n_bytes", [0, 7, 100, 5000])
def test_a_truncated_safetensors_file_is_rejected(folder, n_bytes):
    file = folder / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:n_bytes])
    with pytest.raises(WeightsError, match=r"part-0\.safetensors: "):
        load_model(folder)


def test_pickled_weights_are_rejected_with_a_solution(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: .*save_pretrained"):
        load_model(folder)


def test_a_folder_without_weights_is_rejected(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors .*model\.safetensors\.index\.json"):
        load_model(folder)


def test_an_unknown_model_type_is_rejected(folder):
    change_config(folder, model_type="gpt22")
    with pytest.raises(ConfigError, match=r"model_type='gpt22'.*'gpt2'"):
        load_model(folder)


def test_the_error_of_a_missing_key_names_the_file_and_the_key(folder):
    change_config(folder, n_layer=None)
    with pytest.raises(ConfigError, match=r"model/config\.json: gpt: n_layer\b"):
        load_model(folder)


def test_an_unknown_family_is_rejected(folder):
    (folder / "config.json").write_text('{"family": "gtp"}')
    with pytest.raises(ConfigError, match=r"'gtp'.*'gpt'"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"gpt2"'])
def test_a_config_that_is_not_an_object_is_rejected(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json: "):
        load_model(folder)


def test_missing_weights_are_listed(folder):
    change_config(folder, n_layer=3)
    with pytest.raises(WeightsError, match=r"\b12 missing: transformer\.h\.2"):
        load_model(folder)


def test_an_invalid_vocabulary_is_rejected(folder, tmp_path):
    loaded = random_model("gpt2")
    state = json.loads(byte_level_tokenizer().backend.to_str())
    state["added_tokens"].append({**state["added_tokens"][0], "id": 307, "content": "<one more>"})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(WeightsError, match=r"\b308 ids.*\b307\b"):
        load_model(folder)
    assert loaded.tokenizer.vocab_size == 307


def test_a_model_without_a_tokenizer_can_be_loaded(folder):
    (folder / "tokenizer.json").unlink()
    loaded = load_model(folder)
    assert loaded.tokenizer is None
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        require_tokenizer(loaded, folder)


def test_an_unknown_storage_format_is_rejected(tmp_path):
    save_native_int8(random_model("gpt2"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(read_safetensors(file), file, metadata={"qkv_storage": "int3"})
    with pytest.raises(WeightsError, match=r"qkv_storage.*'int8-rows'.*'int3'"):
        load_model(tmp_path / "model")
