"""Configs are frozen and keyword-only, and invalid values raise a one-line error."""

import pytest
from pydantic import ValidationError

from qkv.config import FinetuningSettings, GPTConfig, RNNConfig, SamplingConfig
from qkv.config.base import did_you_mean_suffix
from qkv.cost.workload import Workload
from qkv.errors import ConfigError

SMALL = {"vocab_size": 31, "context_length": 13, "d_model": 12, "n_heads": 3, "n_layers": 2}


def test_the_error_for_an_unknown_key_suggests_the_closest_key():
    with pytest.raises(ConfigError, match=r"^gpt: .*'n_head'.*'n_heads'"):
        GPTConfig(**SMALL, n_head=3)


def test_the_error_for_an_unknown_key_without_similar_keys_has_no_suggestion():
    with pytest.raises(ConfigError, match=r"^gpt: [^']*'zzz'$"):
        GPTConfig(**SMALL, zzz=3)


@pytest.mark.parametrize("key", SMALL)
def test_the_error_for_a_missing_key_contains_its_name(key):
    with pytest.raises(ConfigError, match=f"^gpt: {key} "):
        GPTConfig(**{name: value for name, value in SMALL.items() if name != key})


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"d_model": 0}, r"d_model=0: .*\b1\b"),
        ({"d_model": -4}, r"d_model=-4: .*\b1\b"),
        ({"d_model": "12"}, "d_model='12': .*integer"),
        ({"d_model": 12.0}, r"d_model=12\.0: .*integer"),
        ({"d_model": True}, "d_model=True: .*integer"),
        ({"n_layers": None}, "n_layers=None: .*integer"),
        ({"dropout": 1.0}, r"dropout=1\.0: .*\b1\b"),
        ({"dropout": -0.1}, r"dropout=-0\.1: .*\b0\b"),
        ({"norm_eps": 0.0}, r"norm_eps=0\.0: .*\b0\b"),
        ({"norm_eps": float("nan")}, "norm_eps=nan: .*finite"),
        ({"position_offset": -1}, r"position_offset=-1: .*\b0\b"),
        ({"sliding_window": 0}, r"sliding_window=0: .*\b1\b"),
        ({"activation": "gelo"}, "activation='gelo': .*'relu', 'gelu', 'gelu-tanh' or 'silu'"),
        ({"positions": "rotry"}, "positions='rotry': .*'none', 'learned'"),
        ({"family": "bert"}, "family='bert': .*'gpt'"),
    ],
)
def test_the_error_for_an_invalid_value_is_one_line_with_the_value(change, pattern):
    with pytest.raises(ConfigError, match=f"^gpt: {pattern}") as error:
        GPTConfig(**{**SMALL, **change})
    assert "\n" not in str(error.value)


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        GPTConfig(**SMALL).d_model = 24


def test_a_config_only_accepts_keyword_arguments():
    with pytest.raises(TypeError, match="positional"):
        GPTConfig(31)


def test_replace_recomputes_derived_defaults():
    config = GPTConfig(**SMALL)
    assert (config.d_ff, config.d_head) == (48, 4)
    wider = config.replace(d_model=24)
    assert (wider.d_ff, wider.d_head) == (96, 8)


def test_replace_keeps_explicitly_set_fields():
    assert GPTConfig(**SMALL, d_ff=17).replace(d_model=24).d_ff == 17


def test_replace_validates_the_result():
    with pytest.raises(ConfigError, match=r"d_model=13 .*n_heads=3"):
        GPTConfig(**SMALL).replace(d_model=13)
    with pytest.raises(ConfigError, match=r"'d_modle'.*'d_model'"):
        GPTConfig(**SMALL).replace(d_modle=24)


def test_configs_compare_by_value_and_class():
    assert GPTConfig(**SMALL) == GPTConfig(**SMALL)
    assert GPTConfig(**SMALL) != GPTConfig(**SMALL, dropout=0.1)
    assert RNNConfig(vocab_size=31, d_model=12) != GPTConfig(**SMALL)


def test_only_similar_words_and_completions_are_suggested():
    assert "'gpt2'" in did_you_mean_suffix("gpt", ["gpt2", "bert"])
    assert did_you_mean_suffix("zzz", ["gpt2", "bert"]) == ""
    assert did_you_mean_suffix("foo", ["one-hot", "toy-head-7"]) == ""  # a similarity of 0.4
    assert "'walkthrough'" in did_you_mean_suffix("walk", ["walkthrough", "talk"])
    assert did_you_mean_suffix("to", ["toy-head-7"]) == ""


def test_errors_start_with_the_name_of_the_table_instead_of_the_class():
    with pytest.raises(ConfigError, match=r"^sampling: temperature=-1\.0: "):
        SamplingConfig(temperature=-1.0)
    with pytest.raises(ConfigError, match=r"^finetuning: .*'epoch'.*'epochs'"):
        FinetuningSettings(epoch=2)
    with pytest.raises(ConfigError, match=r"^batch_size=0: "):
        Workload(batch_size=0, seq_len=3)


def test_a_misspelled_key_takes_precedence_over_the_key_it_leaves_missing():
    with pytest.raises(ConfigError, match=r"'vocab_siz'.*'vocab_size'"):
        GPTConfig(vocab_siz=512, context_length=64, d_model=32, n_heads=2, n_layers=1)
