"""Pooling settings of sentence-transformers folders round trip, and modules that change the embedding are rejected."""

import json
import shutil

import pytest

from qkv.choices import Pooling
from qkv.config import SentenceEmbedding
from qkv.errors import ConfigError, WeightsError
from qkv.weights.checkpoint_folder import check_folder_matches_manifest
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_hf, save_native_int8
from tests.weights.loaded_models import assert_same_weights, random_model
from tests.weights.small_berts import random_bert

EMBEDDING = {"pooling": "mean", "normalize": True, "max_tokens": 37}


@pytest.fixture
def folder(tmp_path):
    save_hf(random_bert(sentence_embedding=EMBEDDING), tmp_path / "model")
    return tmp_path / "model"


def change_json(path, **settings):
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))


def write_modules(folder, *kinds, paths=("", "1_Pooling", "2_Normalize", "3_Dense")):
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize(("normalize", "max_tokens"), [(True, 37), (False, None)])
def test_pooling_round_trips(pooling, normalize, max_tokens, tmp_path):
    embedding = SentenceEmbedding(pooling=pooling, normalize=normalize, max_tokens=max_tokens)
    loaded = random_bert(sentence_embedding=embedding)
    save_hf(loaded, tmp_path / "out")
    check_folder_matches_manifest(tmp_path / "out")
    save_native_int8(loaded, tmp_path / "int8")
    for name in ("out", "int8"):
        assert load_model(tmp_path / name).model.config.sentence_embedding == embedding
    assert_same_weights(load_model(tmp_path / "out"), loaded)


def test_a_changed_pooling_file_is_detected(folder):
    change_json(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    with pytest.raises(WeightsError, match=r"1_Pooling/config\.json: .*\d+ bytes"):
        check_folder_matches_manifest(folder)


def test_a_model_without_pooling_has_no_modules_file(tmp_path):
    save_hf(random_bert(), tmp_path / "out")
    assert not (tmp_path / "out" / "modules.json").exists()
    assert load_model(tmp_path / "out").model.config.sentence_embedding is None


@pytest.mark.parametrize(("max_tokens", "expected"), [(31, 31), (41, None), (int(1e30), None)])
def test_the_format_of_version_6_is_read(folder, max_tokens, expected):
    (folder / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 35, "pooling_mode": "cls"}')
    (folder / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    change_json(folder / "tokenizer_config.json", model_max_length=max_tokens)
    embedding = load_model(folder).model.config.sentence_embedding
    assert (embedding.pooling, embedding.max_tokens) == (Pooling.CLS, expected)


def test_the_subfolder_of_early_versions_is_read(folder, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(folder, old / "0_Transformer")
    shutil.move(old / "0_Transformer" / "1_Pooling", old)
    (old / "config.json").write_text('{"__version__": "0.3.8"}')
    write_modules(old, "Transformer", "Pooling", paths=("0_Transformer", "1_Pooling"))
    (old / "0_Transformer" / "modules.json").unlink()
    loaded = load_model(old)
    assert loaded.model.config.sentence_embedding == SentenceEmbedding(max_tokens=37)
    assert_same_weights(loaded, load_model(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_mean_tokens, pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": False}, r"1_Pooling.config\.json: "),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
    ],
)
def test_unsupported_pooling_modes_are_rejected(folder, settings, message):
    change_json(folder / "1_Pooling" / "config.json", **settings)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


def test_a_dense_layer_after_pooling_is_rejected(folder):
    write_modules(folder, "Transformer", "Pooling", "Dense")
    with pytest.raises(WeightsError, match=r"modules\.json: .*Transformer, Pooling, Dense"):
        load_model(folder)


@pytest.mark.parametrize("path", ["../model", "/etc", "a/b"])
def test_a_module_outside_of_the_folder_is_rejected(folder, path):
    write_modules(folder, "Transformer", "Pooling", paths=("", path))
    with pytest.raises(WeightsError, match=rf"modules\.json: .*'{path}'"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{}", "[1]", "[{}]", "[", "[]"])
def test_an_invalid_list_of_modules_is_rejected(folder, text):
    (folder / "modules.json").write_text(text)
    with pytest.raises(WeightsError, match=r"modules\.json: "):
        load_model(folder)


@pytest.mark.parametrize("max_tokens", [0, "many", 2.5])
def test_an_invalid_maximum_length_is_rejected(folder, max_tokens):
    change_json(folder / "sentence_bert_config.json", max_seq_length=max_tokens)
    with pytest.raises(WeightsError, match=rf"max_seq_length.*{max_tokens!r}"):
        load_model(folder)


def test_lower_casing_outside_of_the_tokenizer_is_rejected(folder):
    change_json(folder / "sentence_bert_config.json", do_lower_case=True)
    with pytest.raises(WeightsError, match="do_lower_case"):
        load_model(folder)


def test_a_default_prompt_is_reported(folder):
    change_json(folder / "config_sentence_transformers.json", default_prompt_name="query", prompts={"query": "query: "})
    (remark,) = load_model(folder).remarks
    assert "config_sentence_transformers.json" in remark
    assert "'query'" in remark


def test_sentence_embeddings_of_a_gpt_are_rejected(folder, tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "gpt")
    for name in ("modules.json", "1_Pooling"):
        shutil.move(folder / name, tmp_path / "gpt")
    with pytest.raises(ConfigError, match=r"modules\.json.*bert.*gpt"):
        load_model(tmp_path / "gpt")
