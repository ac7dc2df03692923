"""Defaults and consistency checks of model configs."""

import subprocess
import sys

import pytest

from qkv.choices import HeadCombination, NormPosition, PositionKind, ProblemType
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, load_config, save_config
from qkv.errors import ConfigError

SMALL = {"vocab_size": 31, "context_length": 13, "d_model": 12, "n_heads": 3}
GPT = {**SMALL, "n_layers": 2}


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"d_model": 13}, "d_model=13 .*n_heads=3$"),
        ({"n_heads": 24}, "d_model=12 .*n_heads=24$"),
        ({"n_kv_heads": 6}, "n_kv_heads=6 .*n_heads=3$"),
        ({"n_kv_heads": 2}, "n_heads=3 .*n_kv_heads=2$"),
        ({"positions": "rotary", "d_head": 5}, "rotary.*d_head=5$"),
        ({"positions": "sinusoidal", "d_model": 15}, "sinusoidal.*d_model=15$"),
        ({"positions": "concatenated", "d_model": 15}, "sinusoidal.*d_model=15$"),
        ({"positions": "relative", "relative_buckets": 6}, r"relative_buckets .*\b4, got 6$"),
        (
            {"positions": "relative", "relative_buckets": 32, "relative_max_distance": 16},
            "relative_max_distance=16 .*relative_buckets/2=16$",
        ),
        ({"output_projection": False, "d_value": 5}, "output_projection.* n_heads·d_value=15 .*d_model=12$"),
        ({"head_combination": "pooled", "d_value": 4}, "pooled.* d_value=4 .*d_model=12$"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.*positions='learned'$"),
    ],
)
def test_the_error_for_contradictory_fields_contains_both_values(change, pattern):
    with pytest.raises(ConfigError, match=pattern):
        GPTConfig(**{**GPT, **change})


def test_defaults_are_derived_from_other_fields():
    config = GPTConfig(**GPT)
    assert (config.n_kv_heads, config.d_head, config.d_value, config.d_ff) == (3, 4, 4, 48)


def test_an_explicit_head_width_need_not_divide_d_model():
    config = GPTConfig(**{**GPT, "d_model": 13}, d_head=7)
    assert (config.d_head, config.d_value) == (7, 7)


@pytest.mark.parametrize("layout", [HeadCombination.POOLED, HeadCombination.POOLED_MEAN])
def test_pooled_values_are_as_wide_as_the_model(layout):
    assert GPTConfig(**GPT, head_combination=layout).d_value == 12
    assert not GPTConfig(**GPT, head_combination=layout, output_projection=False).output_projection


def test_enum_fields_accept_strings():
    assert GPTConfig(**GPT, positions="alibi").positions is PositionKind.ALIBI
    assert BERTConfig(**GPT, norm_position="pre").norm_position is NormPosition.PRE


@pytest.mark.parametrize("head", [{"next_sentence_head": True}, {"n_classes": 3}])
def test_the_next_sentence_and_classification_heads_require_the_pooler(head):
    with pytest.raises(ConfigError, match=r"next_sentence_head.*n_classes.*pooler=False"):
        BERTConfig(**GPT, pooler=False, **head)


def test_the_number_of_classes_defaults_to_the_number_of_class_names():
    config = BERTConfig(**GPT, class_names=["no", "maybe", "yes"])
    assert (config.class_names, config.n_classes, config.problem_type) == (
        ("no", "maybe", "yes"),
        3,
        ProblemType.SINGLE_LABEL,
    )


def test_a_single_output_defaults_to_regression():
    assert BERTConfig(**GPT, n_classes=1).problem_type is ProblemType.REGRESSION
    assert BERTConfig(**GPT, n_classes=1, problem_type="multi-label").problem_type is ProblemType.MULTI_LABEL


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"class_names": ["a", "b"], "n_classes": 3}, r"n_classes=3.* class_names .*\b2\b"),
        ({"class_names": ["a", "b", "a"]}, "class_names .*'a'"),
        ({"class_names": []}, r"bert: class_names=.*\b1\b"),
        ({"problem_type": "regression"}, r"problem_type='regression'.*n_classes.*class_names"),
        ({"n_classes": 2, "problem_type": "regression"}, "problem_type='regression'.*n_classes=2"),
        ({"n_classes": 1, "problem_type": "single-label"}, r"problem_type='single-label'.*\b2\b.*n_classes=1"),
    ],
)
def test_contradictory_class_settings_are_errors(settings, pattern):
    with pytest.raises(ConfigError, match=f"^{pattern}"):
        BERTConfig(**GPT, **settings)


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_bert_config_with_class_names_and_pooling_survives_saving(tmp_path, ending):
    config = BERTConfig(
        **GPT, n_segments=0, class_names=["bad", "good"], problem_type="multi-label",
        sentence_embedding={"pooling": "cls", "normalize": True},
    )  # fmt: skip
    save_config(config, tmp_path / f"config.{ending}")
    assert load_config(tmp_path / f"config.{ending}") == config


def test_shared_embeddings_require_equal_vocabularies():
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 1}
    with pytest.raises(ConfigError, match=r"share_embeddings .*source_vocab_size=29 .*vocab_size=31"):
        Seq2SeqConfig(**SMALL, **layers, source_vocab_size=29)
    config = Seq2SeqConfig(**SMALL, **layers, source_vocab_size=29, share_embeddings=False)
    assert config.source_vocab_size == 29


def test_an_image_source_has_no_vocabulary(tmp_path):
    image = {**SMALL, "n_encoder_layers": 1, "n_decoder_layers": 1, "d_patch": 48}
    for vocabulary in ({}, {"share_embeddings": False, "source_vocab_size": 29}):
        with pytest.raises(ConfigError, match=r"d_patch=48: .*share_embeddings=False.*source_vocab_size"):
            Seq2SeqConfig(**image, **vocabulary)
    config = Seq2SeqConfig(**image, share_embeddings=False)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_the_width_of_an_rnn_must_be_even():
    with pytest.raises(ConfigError, match="d_model=13"):
        RNNConfig(vocab_size=31, d_model=13)


def test_config_never_imports_torch():
    code = "import sys, qkv.config; qkv.config.preset('gpt2'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
