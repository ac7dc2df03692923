"""BERT and its kin in folders: heads, class names and tokenizer go to `transformers` and come back."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from qkv.choices import ProblemType
from qkv.errors import ConfigError
from qkv.weights import config_from_published
from qkv.weights.atomic_folder import check_folder, read_tensors
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_hf, save_int8
from tests.weights.small_berts import random_bert
from tests.weights.loaded_models import assert_same_weights

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
FIRST, SECOND = "The cat sat on the mat.", "Then both slept."
NAMES = ("no", "maybe, or not", "yés")
KINDS = {
    "one class": {"class_names": NAMES},
    "several labels": {"class_names": NAMES, "problem_type": ProblemType.MULTI_LABEL},
    "a number": {"class_names": ("relatedness",)},
    "classes without names": {"n_classes": 7},
    "both games": {"masked_lm_head": True, "next_sentence_head": True},
    "everything": {"masked_lm_head": True, "next_sentence_head": True, "class_names": NAMES},
    "distilbert": {"n_segments": 0, "pooler_activation": "relu", "class_names": NAMES, "masked_lm_head": True},
    "roberta": {"n_segments": 1, "position_offset": 2, "class_names": NAMES, "masked_lm_head": True},
}


def their_model(folder):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(hf, architecture).from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_heads_and_tokenizer_and_says_the_same_of_a_pair(kind, tmp_path):
    loaded = random_bert(**KINDS[kind])
    save_hf(loaded, tmp_path / "out")
    check_folder(tmp_path / "out")
    theirs = their_model(tmp_path / "out")
    given = hf.AutoTokenizer.from_pretrained(tmp_path / "out")(FIRST, SECOND, return_tensors="pt")
    pair = loaded.tokenizer.encode_pair(FIRST, SECOND)
    assert given["input_ids"].tolist() == [pair.ids]
    if loaded.model.config.n_segments == 2:
        assert given["token_type_ids"].tolist() == [pair.segments]
        assert set(pair.segments) == {0, 1}
    elif loaded.model.config.n_segments == 1:
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    segments = given.get("token_type_ids")
    with torch.no_grad():
        answer = theirs(**given, output_hidden_states=True)
        states = loaded.model(given["input_ids"], segments=segments)
        assert (states - answer.hidden_states[-1]).abs().max() <= 1e-5
        if loaded.model.config.n_classes is not None:
            assert (loaded.model.class_logits(states) - answer.logits).abs().max() <= 1e-5
        else:
            assert (loaded.model.masked_lm_logits(states) - answer.prediction_logits).abs().max() <= 1e-4
            assert (loaded.model.next_sentence_logits(states) - answer.seq_relationship_logits).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "class_names" in KINDS[kind]])
def test_class_names_and_the_kind_of_problem_reach_transformers(kind, tmp_path):
    config = random_bert(**KINDS[kind]).model.config
    save_hf(random_bert(**KINDS[kind]), tmp_path / "out")
    theirs = hf.AutoConfig.from_pretrained(tmp_path / "out")
    assert tuple(theirs.id2label[i] for i in range(theirs.num_labels)) == config.class_names
    assert theirs.label2id == {name: i for i, name in enumerate(config.class_names)}
    said = {"single-label": "single_label", "multi-label": "multi_label", "regression": "regression"}
    assert theirs.problem_type.removesuffix("_classification") == said[config.problem_type]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "everything"])
def test_what_transformers_saves_again_comes_back_byte_for_byte(kind, tmp_path):
    kept = {key: value for key, value in KINDS[kind].items() if key != "masked_lm_head" or kind == "both games"}
    first = random_bert(**kept)
    save_hf(first, tmp_path / "first")
    their_model(tmp_path / "first").save_pretrained(tmp_path / "theirs")
    back = load_model(tmp_path / "theirs")
    assert back.remarks == ()
    assert back.model.config == first.model.config
    assert_same_weights(back, first)
    save_hf(back, tmp_path / "again")
    once, again = (read_tensors(tmp_path / folder / "model.safetensors") for folder in ("first", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in once.items())


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_road_there_and_back_changes_nothing(kind, tmp_path):
    first = random_bert(**KINDS[kind])
    save_hf(first, tmp_path / "out")
    back = load_model(tmp_path / "out")
    assert back.model.config == first.model.config
    assert_same_weights(back, first)
    assert back.tokenizer.fingerprint == first.tokenizer.fingerprint
    save_int8(first, tmp_path / "int8")
    assert load_model(tmp_path / "int8").model.config == first.model.config


def without(folder, part):
    """The same folder, its file cut by every tensor that has `part` in its name."""
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in read_tensors(file).items() if part not in name}, file)
    return load_model(folder)


@pytest.mark.parametrize(
    ("kind", "part", "head", "said"),
    [
        ("both games", "cls.predictions", "masked_lm", "masked-word head (cls.predictions.transform.dense.weight)"),
        ("both games", "cls.seq_relationship", "next_sentence", "next-sentence head (cls.seq_relationship.weight)"),
        ("one class", "classifier", "classifier", "classification head (classifier.weight)"),
        ("distilbert", "classifier", "pooler", "pooler (pre_classifier.weight)"),
        ("roberta", "classifier", "classifier", "classification head (classifier.out_proj.weight)"),
    ],
)
def test_a_head_that_the_weights_lack_is_said_and_not_made_up(kind, part, head, said, tmp_path):
    save_hf(random_bert(**KINDS[kind]), tmp_path / "out")
    loaded = without(tmp_path / "out", part)
    remarks = [remark for remark in loaded.remarks if f"the weights hold no {said}, though the config says" in remark]
    assert len(remarks) == 1
    assert getattr(loaded.model, head) is None


def test_robertas_pre_training_pooler_is_left_out_beside_a_classification_head(tmp_path):
    first = random_bert(**KINDS["roberta"])
    save_hf(first, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.ones(35, 35), "roberta.pooler.dense.bias": torch.ones(35)}
    save_file({**read_tensors(file), **pooler}, file)
    assert_same_weights(load_model(tmp_path / "out"), first)


CLASSES = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 31, "hidden_size": 6,
    "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 7,
}  # fmt: skip
ROBERTA = {**CLASSES, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**CLASSES, "id2label": {"0": "a", "2": "b"}}, "id2label has the keys 0, 2; they must be 0 … 1"),
        ({**CLASSES, "id2label": {"x": "a"}}, "id2label has the keys x; they must be 0 … 0"),
        ({**CLASSES, "id2label": {"0": "a", "1": "a"}}, "class_names has 'a' twice"),
        ({**CLASSES, "problem_type": "ranking"}, "problem_type='ranking' is not supported; known: single_label"),
        ({**CLASSES, "num_labels": 3, "problem_type": "regression"}, "'regression' has one output, not n_classes=3"),
        ({**ROBERTA, "hidden_act": "relu"}, "hidden_act='relu': RoBERTa's masked-word head has gelu always"),
        ({**ROBERTA, "pad_token_id": "<pad>"}, "pad_token_id='<pad>' is a str, not a whole number"),
        ({**ROBERTA, "architectures": ["RobertaForCausalLM"]}, "is not supported; known: RobertaModel"),
    ],
)
def test_published_settings_of_heads_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_from_published(settings)


def test_classes_are_in_the_order_of_their_numbers():
    labels = {"1": "b", "2": "c", "0": "a", **{str(i): f"{i}" for i in range(3, 12)}}
    config = config_from_published({**CLASSES, "id2label": labels})
    assert config.class_names == ("a", "b", "c", *(f"{i}" for i in range(3, 12)))
    assert config_from_published({**CLASSES, "num_labels": 1}).problem_type is ProblemType.REGRESSION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unembedding_bias": False}, "a published bert cannot have unembedding_bias=False"),
        ({"pooler_activation": "relu"}, "a published bert cannot have pooler_activation=relu"),
        ({"n_segments": 0, "next_sentence_head": True}, "a published distilbert cannot have .*next_sentence_head=True"),
        ({"position_offset": 2, "activation": "relu"}, "masked-word head has gelu always"),
    ],
)
def test_a_bert_that_nobody_published_is_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        save_hf(random_bert(masked_lm_head=True, **change), tmp_path / "out")
    assert not list(tmp_path.iterdir())
