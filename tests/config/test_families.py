"""What describes a model, and which settings contradict each other."""

import subprocess
import sys

import pytest

from qkv.choices import HeadLayout, NormPosition, PositionKind, ProblemType
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, load_config, save_config
from qkv.errors import ConfigError

SMALL = {"vocab_size": 31, "context_length": 13, "d_model": 12, "n_heads": 3}
GPT = {**SMALL, "n_layers": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 13}, "d_model=13 must be a multiple of n_heads=3"),
        ({"n_heads": 24}, "d_model=12 must be a multiple of n_heads=24"),
        ({"n_kv_heads": 6}, "n_kv_heads=6 must not be more than n_heads=3"),
        ({"n_kv_heads": 2}, "n_heads=3 must be a multiple of n_kv_heads=2"),
        ({"positions": "rotary", "d_head": 5}, "rotary positions turn pairs: d_head=5 must be even"),
        ({"positions": "sinusoidal", "d_model": 15}, "sinusoidal positions come in pairs: d_model=15 must be even"),
        ({"positions": "concatenated", "d_model": 15}, "sinusoidal positions come in pairs: d_model=15 must be even"),
        ({"positions": "relative", "relative_buckets": 6}, "relative_buckets=6 must be a multiple of 4"),
        (
            {"positions": "relative", "relative_buckets": 32, "relative_max_distance": 16},
            "relative_max_distance=16 must be more than relative_buckets/2=16",
        ),
        ({"output_projection": False, "d_value": 5}, "without output_projection n_heads·d_value=15 must be d_model=12"),
        ({"head_layout": "pooled", "d_value": 4}, "pooled heads add up: d_value=4 must be d_model=12"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_numbers(change, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        GPTConfig(**{**GPT, **change})


def test_what_is_not_given_is_derived():
    config = GPTConfig(**GPT)
    assert (config.n_kv_heads, config.d_head, config.d_value, config.d_ff) == (3, 4, 4, 48)


def test_a_head_may_have_any_width_once_it_is_said():
    config = GPTConfig(**{**GPT, "d_model": 13}, d_head=7)
    assert (config.d_head, config.d_value) == (7, 7)


@pytest.mark.parametrize("layout", [HeadLayout.POOLED, HeadLayout.POOLED_MEAN])
def test_pooled_values_are_as_wide_as_the_model(layout):
    assert GPTConfig(**GPT, head_layout=layout).d_value == 12
    assert not GPTConfig(**GPT, head_layout=layout, output_projection=False).output_projection


def test_words_of_a_choice_may_be_given_as_text():
    assert GPTConfig(**GPT, positions="alibi").positions is PositionKind.ALIBI
    assert BERTConfig(**GPT, norm_position="pre").norm_position is NormPosition.PRE


@pytest.mark.parametrize("head", [{"next_sentence_head": True}, {"n_classes": 3}])
def test_berts_heads_on_cls_need_the_pooler(head):
    with pytest.raises(ConfigError, match="pooler=False, but next_sentence_head and n_classes read the pooler"):
        BERTConfig(**GPT, pooler=False, **head)


def test_class_names_say_how_many_classes_there_are():
    config = BERTConfig(**GPT, class_names=["no", "maybe", "yes"])
    assert (config.class_names, config.n_classes, config.problem_type) == (
        ("no", "maybe", "yes"),
        3,
        ProblemType.SINGLE_LABEL,
    )


def test_one_output_is_a_number_unless_said():
    assert BERTConfig(**GPT, n_classes=1).problem_type is ProblemType.REGRESSION
    assert BERTConfig(**GPT, n_classes=1, problem_type="multi-label").problem_type is ProblemType.MULTI_LABEL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_names": ["a", "b"], "n_classes": 3}, "n_classes=3, but class_names has 2 names"),
        ({"class_names": ["a", "b", "a"]}, "class_names has 'a' twice"),
        ({"class_names": []}, "bert: class_names=.*at least 1 item"),
        (
            {"problem_type": "regression"},
            r"problem_type='regression', but there is no classification head \(n_classes, class_names\)",
        ),
        ({"n_classes": 2, "problem_type": "regression"}, "problem_type='regression' has one output, not n_classes=2"),
        (
            {"n_classes": 1, "problem_type": "single-label"},
            "problem_type='single-label' needs at least 2 classes, not n_classes=1",
        ),
    ],
)
def test_classes_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        BERTConfig(**GPT, **settings)


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_bert_with_names_and_pooling_is_the_same_after_a_file(tmp_path, ending):
    config = BERTConfig(
        **GPT, n_segments=0, class_names=["bad", "good"], problem_type="multi-label",
        sentence_embedding={"pooling": "cls", "normalize": True},
    )  # fmt: skip
    save_config(config, tmp_path / f"config.{ending}")
    assert load_config(tmp_path / f"config.{ending}") == config


def test_one_table_needs_one_vocabulary():
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 1}
    with pytest.raises(ConfigError, match="source_vocab_size=29, vocab_size=31"):
        Seq2SeqConfig(**SMALL, **layers, source_vocab_size=29)
    config = Seq2SeqConfig(**SMALL, **layers, source_vocab_size=29, share_embeddings=False)
    assert config.source_vocab_size == 29


def test_a_picture_has_no_words(tmp_path):
    picture = {**SMALL, "n_encoder_layers": 1, "n_decoder_layers": 1, "d_patch": 48}
    for words in ({}, {"share_embeddings": False, "source_vocab_size": 29}):
        with pytest.raises(ConfigError, match="d_patch=48: the source is a picture, which has no words"):
            Seq2SeqConfig(**picture, **words)
    config = Seq2SeqConfig(**picture, share_embeddings=False)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_an_rnns_two_directions_share_the_width():
    with pytest.raises(ConfigError, match="two directions share d_model=13, which must be even"):
        RNNConfig(vocab_size=31, d_model=13)


def test_config_never_imports_torch():
    code = "import sys, qkv.config; qkv.config.preset('gpt2'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
