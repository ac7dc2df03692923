"""A model's folder that is not whole, not ours, or not safe: one clear line each."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from qkv.errors import ConfigError, InputError, WeightsError
from qkv.weights.atomic_folder import read_tensors
from qkv.weights.model_loader import load_model, require_tokenizer
from qkv.weights.save import save_hf, save_int8
from tests.weights.loaded_models import byte_level, random_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of two shards."""
    save_hf(random_model("gpt2"), tmp_path / "model")
    tensors = read_tensors(tmp_path / "model" / "model.safetensors")
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


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_two_shards_are_one_model(folder):
    assert torch.equal(
        load_model(folder).model.state_dict()["final_norm.weight"],
        random_model("gpt2").model.state_dict()["final_norm.weight"],
    )


def test_a_missing_shard_is_named(folder):
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"part-1\.safetensors: cannot be read: No such file"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../part-0.safetensors", "/etc/passwd", "in/side.safetensors"])
def test_an_index_that_points_outside_is_refused_before_anything_is_opened(folder, shard):
    shutil.copy(folder / "part-0.safetensors", folder.parent / "part-0.safetensors")
    first, *_ = index = read_index(folder)
    write_index(folder, {**index, first: shard})
    with pytest.raises(WeightsError, match=rf"index\.json: '{shard}' points outside the folder"):
        load_model(folder)


def test_an_index_that_lists_other_tensors_is_refused(folder):
    index = read_index(folder)
    write_index(folder, {**index, "more": "part-0.safetensors"})
    with pytest.raises(WeightsError, match=rf"lists {len(index) + 1} tensors, the shards hold {len(index)}; more is"):
        load_model(folder)


@pytest.mark.parametrize("index", [[], {"a": 1}, None])
def test_an_index_of_another_kind_is_refused(folder, index):
    write_index(folder, index)
    with pytest.raises(WeightsError, match="weight_map must be a table"):
        load_model(folder)


@pytest.mark.parametrize("kept", [0, 7, 100, 5000])
def test_a_cut_off_safetensors_is_refused(folder, kept):
    file = folder / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"part-0\.safetensors: "):
        load_model(folder)


def test_pickled_weights_are_refused_with_the_way_out(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: pickled weights can run code .*save_pretrained"):
        load_model(folder)


def test_no_weights_at_all(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(folder)


def test_a_config_of_an_unknown_family_is_refused(folder):
    change(folder, model_type="gpt22")
    with pytest.raises(ConfigError, match=r"model_type='gpt22' is unknown; .*did you mean 'gpt2'"):
        load_model(folder)


def test_a_published_config_that_lacks_a_key_is_told_the_file_and_the_key(folder):
    change(folder, n_layer=None)
    with pytest.raises(ConfigError, match=r"model/config\.json: gpt: n_layer is missing$"):
        load_model(folder)


def test_our_own_config_of_an_unknown_family_is_refused(folder):
    (folder / "config.json").write_text('{"family": "gtp"}')
    with pytest.raises(ConfigError, match=r"unknown family 'gtp'; .*did you mean 'gpt'"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"gpt2"'])
def test_a_config_that_is_no_table_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json: (not valid JSON|holds a)"):
        load_model(folder)


def test_weights_of_another_size_are_listed(folder):
    change(folder, n_layer=3)
    with pytest.raises(WeightsError, match=r"weights do not fit the model: 12 missing: transformer\.h\.2"):
        load_model(folder)


def test_a_vocabulary_that_does_not_fit_is_refused(folder, tmp_path):
    loaded = random_model("gpt2")
    state = json.loads(byte_level().backend.to_str())
    state["added_tokens"].append({**state["added_tokens"][0], "id": 307, "content": "<one more>"})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(WeightsError, match="the tokenizer has 308 ids, the model 307"):
        load_model(folder)
    assert loaded.tokenizer.vocab_size == 307


def test_a_model_without_a_tokenizer_loads_until_one_is_needed(folder):
    (folder / "tokenizer.json").unlink()
    loaded = load_model(folder)
    assert loaded.tokenizer is None
    with pytest.raises(InputError, match=r"has no tokenizer \(.*tokenizer\.json"):
        require_tokenizer(loaded, folder)


def test_a_storage_of_tomorrow_is_refused(tmp_path):
    save_int8(random_model("gpt2"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(read_tensors(file), file, metadata={"qkv_storage": "int3"})
    with pytest.raises(WeightsError, match="is stored as 'int3'; this version reads 'int8-rows'"):
        load_model(tmp_path / "model")
