"""Heads, class names and tokenizers of BERT, DistilBERT and RoBERTa round trip through `transformers`."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from qkv.choices import ProblemType
from qkv.errors import ConfigError
from qkv.weights import config_from_published
from qkv.weights.checkpoint_folder import check_folder_matches_manifest, read_safetensors
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_hf, save_native_int8
from tests.weights.loaded_models import assert_same_weights
from tests.weights.small_berts import random_bert

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
FIRST, SECOND = "The cat sat on the mat.", "Then both slept."
NAMES = ("no", "maybe, or not", "yés")
KINDS = {
    "single label": {"class_names": NAMES},
    "multiple labels": {"class_names": NAMES, "problem_type": ProblemType.MULTI_LABEL},
    "regression": {"class_names": ("relatedness",)},
    "unnamed classes": {"n_classes": 7},
    "pre-training heads": {"masked_lm_head": True, "next_sentence_head": True},
    "all heads": {"masked_lm_head": True, "next_sentence_head": True, "class_names": NAMES},
    "distilbert": {"n_segments": 0, "pooler_activation": "relu", "class_names": NAMES, "masked_lm_head": True},
    "roberta": {"n_segments": 1, "position_offset": 2, "class_names": NAMES, "masked_lm_head": True},
}


def load_with_transformers(folder):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(hf, architecture).from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_heads_and_tokenizer_and_computes_the_same(kind, tmp_path):
    loaded = random_bert(**KINDS[kind])
    save_hf(loaded, tmp_path / "out")
    check_folder_matches_manifest(tmp_path / "out")
    theirs = load_with_transformers(tmp_path / "out")
    inputs = hf.AutoTokenizer.from_pretrained(tmp_path / "out")(FIRST, SECOND, return_tensors="pt")
    pair = loaded.tokenizer.encode_pair(FIRST, SECOND)
    assert inputs["input_ids"].tolist() == [pair.ids]
    if loaded.model.config.n_segments == 2:
        assert inputs["token_type_ids"].tolist() == [pair.segments]
        assert set(pair.segments) == {0, 1}
    elif loaded.model.config.n_segments == 1:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    segments = inputs.get("token_type_ids")
    with torch.no_grad():
        answer = theirs(**inputs, output_hidden_states=True)
        states = loaded.model(inputs["input_ids"], segments=segments)
        assert (states - answer.hidden_states[-1]).abs().max() <= 1e-5
        if loaded.model.config.n_classes is not None:
            assert (loaded.model.class_logits(states) - answer.logits).abs().max() <= 1e-5
        else:
            assert (loaded.model.masked_lm_logits(states) - answer.prediction_logits).abs().max() <= 1e-4
            assert (loaded.model.next_sentence_logits(states) - answer.seq_relationship_logits).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "class_names" in KINDS[kind]])
def test_transformers_reads_class_names_and_problem_type(kind, tmp_path):
    config = random_bert(**KINDS[kind]).model.config
    save_hf(random_bert(**KINDS[kind]), tmp_path / "out")
    theirs = hf.AutoConfig.from_pretrained(tmp_path / "out")
    assert tuple(theirs.id2label[i] for i in range(theirs.num_labels)) == config.class_names
    assert theirs.label2id == {name: i for i, name in enumerate(config.class_names)}
    published = {"single-label": "single_label", "multi-label": "multi_label", "regression": "regression"}
    assert theirs.problem_type.removesuffix("_classification") == published[config.problem_type]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all heads"])
def test_a_model_saved_by_transformers_is_loaded_without_changes(kind, tmp_path):
    settings = {
        key: value for key, value in KINDS[kind].items() if key != "masked_lm_head" or kind == "pre-training heads"
    }
    first = random_bert(**settings)
    save_hf(first, tmp_path / "first")
    load_with_transformers(tmp_path / "first").save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs")
    assert back.remarks == ()
    assert back.model.config == first.model.config
    assert_same_weights(back, first)
    save_hf(back, tmp_path / "again")
    once, again = (read_safetensors(tmp_path / folder / "model.safetensors") for folder in ("first", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in once.items())


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_changes_nothing(kind, tmp_path):
    first = random_bert(**KINDS[kind])
    save_hf(first, tmp_path / "out")
    back = load_model(tmp_path / "out")
    assert back.model.config == first.model.config
    assert_same_weights(back, first)
    assert back.tokenizer.fingerprint == first.tokenizer.fingerprint
    save_native_int8(first, tmp_path / "int8")
    assert load_model(tmp_path / "int8").model.config == first.model.config


def load_without(folder, part):
    """Remove all tensors with `part` in their names from the folder and load it."""
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in read_safetensors(file).items() if part not in name}, file)
    return load_model(folder)


@pytest.mark.parametrize(
    ("kind", "part", "head", "tensor_name"),
    [
        ("pre-training heads", "cls.predictions", "masked_lm", "cls.predictions.transform.dense.weight"),
        ("pre-training heads", "cls.seq_relationship", "next_sentence", "cls.seq_relationship.weight"),
        ("single label", "classifier", "classifier", "classifier.weight"),
        ("distilbert", "classifier", "pooler", "pre_classifier.weight"),
        ("roberta", "classifier", "classifier", "classifier.out_proj.weight"),
    ],
)
def test_a_missing_head_is_reported_and_not_initialized(kind, part, head, tensor_name, tmp_path):
    save_hf(random_bert(**KINDS[kind]), tmp_path / "out")
    loaded = load_without(tmp_path / "out", part)
    remarks = [remark for remark in loaded.remarks if f"({tensor_name})" in remark]
    assert len(remarks) == 1
    assert getattr(loaded.model, head) is None


def test_the_unused_pooler_of_a_roberta_classifier_is_ignored(tmp_path):
    first = random_bert(**KINDS["roberta"])
    save_hf(first, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.ones(35, 35), "roberta.pooler.dense.bias": torch.ones(35)}
    save_file({**read_safetensors(file), **pooler}, file)
    assert_same_weights(load_model(tmp_path / "out"), first)


CLASSES = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 31, "hidden_size": 6,
    "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 7,
}  # fmt: skip
ROBERTA = {**CLASSES, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**CLASSES, "id2label": {"0": "a", "2": "b"}}, "id2label.*0, 2"),
        ({**CLASSES, "id2label": {"x": "a"}}, r"id2label.*\bx\b"),
        ({**CLASSES, "id2label": {"0": "a", "1": "a"}}, "class_names.*'a'"),
        ({**CLASSES, "problem_type": "ranking"}, "problem_type='ranking'.*single_label"),
        ({**CLASSES, "num_labels": 3, "problem_type": "regression"}, "regression.*n_classes=3"),
        ({**ROBERTA, "hidden_act": "relu"}, "hidden_act='relu'.*gelu"),
        ({**ROBERTA, "pad_token_id": "<pad>"}, "pad_token_id.*'<pad>'"),
        ({**ROBERTA, "architectures": ["RobertaForCausalLM"]}, "RobertaForCausalLM.*RobertaModel"),
    ],
)
def test_invalid_head_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_from_published(settings)


def test_classes_are_sorted_by_id():
    labels = {"1": "b", "2": "c", "0": "a", **{str(i): f"{i}" for i in range(3, 12)}}
    config = config_from_published({**CLASSES, "id2label": labels})
    assert config.class_names == ("a", "b", "c", *(f"{i}" for i in range(3, 12)))
    assert config_from_published({**CLASSES, "num_labels": 1}).problem_type is ProblemType.REGRESSION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unembedding_bias": False}, "bert.*unembedding_bias=False"),
        ({"pooler_activation": "relu"}, "bert.*pooler_activation=relu"),
        ({"n_segments": 0, "next_sentence_head": True}, "distilbert.*next_sentence_head=True"),
        ({"position_offset": 2, "activation": "relu"}, "hidden_act.*gelu"),
    ],
)
def test_a_bert_without_a_published_format_is_rejected(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        save_hf(random_bert(masked_lm_head=True, **change), tmp_path / "out")
    assert not list(tmp_path.iterdir())
