"""Folders of sentence-transformers: how they pool is kept, and what would change the vectors is refused."""

import json
import shutil

import pytest

from qkv.choices import Pooling
from qkv.config import SentenceEmbedding
from qkv.errors import ConfigError, WeightsError
from qkv.weights.atomic_folder import check_folder
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_hf, save_int8
from tests.weights.small_berts import random_bert
from tests.weights.loaded_models import assert_same_weights, random_model

EMBEDDING = {"pooling": "mean", "normalize": True, "max_tokens": 37}


@pytest.fixture
def folder(tmp_path):
    save_hf(random_bert(sentence_embedding=EMBEDDING), tmp_path / "model")
    return tmp_path / "model"


def change(path, **settings):
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))


def modules(folder, *kinds, paths=("", "1_Pooling", "2_Normalize", "3_Dense")):
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize(("normalize", "longest"), [(True, 37), (False, None)])
def test_pooling_goes_out_and_comes_back(pooling, normalize, longest, tmp_path):
    embedding = SentenceEmbedding(pooling=pooling, normalize=normalize, max_tokens=longest)
    loaded = random_bert(sentence_embedding=embedding)
    save_hf(loaded, tmp_path / "out")
    check_folder(tmp_path / "out")
    save_int8(loaded, tmp_path / "int8")
    for name in ("out", "int8"):
        assert load_model(tmp_path / name).model.config.sentence_embedding == embedding
    assert_same_weights(load_model(tmp_path / "out"), loaded)


def test_a_changed_byte_of_the_pooling_is_noticed(folder):
    change(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    with pytest.raises(WeightsError, match=r"1_Pooling/config\.json: \d+ bytes, the manifest says"):
        check_folder(folder)


def test_a_model_without_pooling_settings_is_a_plain_folder(tmp_path):
    save_hf(random_bert(), tmp_path / "out")
    assert not (tmp_path / "out" / "modules.json").exists()
    assert load_model(tmp_path / "out").model.config.sentence_embedding is None


@pytest.mark.parametrize(("longest", "kept"), [(31, 31), (41, None), (int(1e30), None)])
def test_what_version_6_writes_is_read(folder, longest, kept):
    (folder / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 35, "pooling_mode": "cls"}')
    (folder / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    change(folder / "tokenizer_config.json", model_max_length=longest)
    embedding = load_model(folder).model.config.sentence_embedding
    assert (embedding.pooling, embedding.max_tokens) == (Pooling.CLS, kept)


def test_the_first_versions_kept_the_model_one_folder_down(folder, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(folder, old / "0_Transformer")
    shutil.move(old / "0_Transformer" / "1_Pooling", old)
    (old / "config.json").write_text('{"__version__": "0.3.8"}')
    modules(old, "Transformer", "Pooling", paths=("0_Transformer", "1_Pooling"))
    (old / "0_Transformer" / "modules.json").unlink()
    loaded = load_model(old)
    assert loaded.model.config.sentence_embedding == SentenceEmbedding(max_tokens=37)
    assert_same_weights(loaded, load_model(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pools by pooling_mode_mean_tokens, pooling_mode_max_tokens; supported"),
        ({"pooling_mode_mean_tokens": False}, "pools by nothing"),
        ({"pooling_mode": "lasttoken"}, "pools by lasttoken"),
    ],
)
def test_another_pooling_is_refused(folder, settings, message):
    change(folder / "1_Pooling" / "config.json", **settings)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


def test_a_dense_layer_after_pooling_is_refused(folder):
    modules(folder, "Transformer", "Pooling", "Dense")
    with pytest.raises(WeightsError, match=r"modules\.json: the modules are Transformer, Pooling, Dense; supported"):
        load_model(folder)


@pytest.mark.parametrize("path", ["../model", "/etc", "a/b"])
def test_a_module_outside_of_the_folder_is_refused(folder, path):
    modules(folder, "Transformer", "Pooling", paths=("", path))
    with pytest.raises(WeightsError, match=rf"modules\.json: '{path}' points outside the folder"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{}", "[1]", "[{}]", "[", "[]"])
def test_a_list_of_modules_that_is_none_is_refused(folder, text):
    (folder / "modules.json").write_text(text)
    with pytest.raises(WeightsError, match=r"modules\.json: "):
        load_model(folder)


@pytest.mark.parametrize("longest", [0, "many", 2.5])
def test_a_longest_text_that_is_no_number_is_refused(folder, longest):
    change(folder / "sentence_bert_config.json", max_seq_length=longest)
    with pytest.raises(WeightsError, match=f"the longest text is {longest!r}, not a number of tokens"):
        load_model(folder)


def test_lower_case_outside_of_the_tokenizer_is_refused(folder):
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    with pytest.raises(WeightsError, match="do_lower_case"):
        load_model(folder)


def test_a_default_prompt_is_said(folder):
    change(folder / "config_sentence_transformers.json", default_prompt_name="query", prompts={"query": "query: "})
    assert load_model(folder).remarks == (
        "config_sentence_transformers.json has a default prompt, 'query'; it is not put before your texts",
    )


def test_sentence_vectors_of_a_gpt_are_refused(folder, tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "gpt")
    for name in ("modules.json", "1_Pooling"):
        shutil.move(folder / name, tmp_path / "gpt")
    with pytest.raises(ConfigError, match=r"modules\.json makes sentence vectors of a gpt; supported: bert"):
        load_model(tmp_path / "gpt")
