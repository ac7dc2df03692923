"""What every config is: frozen, keyword-only, and refused in one line when it cannot be."""

import pytest
from pydantic import ValidationError

from qkv.config import FinetuningSettings, GPTConfig, RNNConfig, SamplingConfig
from qkv.config.base import suggest_closest
from qkv.cost.workload import Workload
from qkv.errors import ConfigError

SMALL = {"vocab_size": 31, "context_length": 13, "d_model": 12, "n_heads": 3, "n_layers": 2}


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"^gpt: unknown key 'n_head'; did you mean 'n_heads'\?$"):
        GPTConfig(**SMALL, n_head=3)


def test_an_unknown_key_that_is_near_nothing_is_refused_without_a_guess():
    with pytest.raises(ConfigError, match=r"^gpt: unknown key 'zzz'$"):
        GPTConfig(**SMALL, zzz=3)


@pytest.mark.parametrize("key", SMALL)
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"^gpt: {key} is missing$"):
        GPTConfig(**{name: value for name, value in SMALL.items() if name != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model=0: input should be greater than or equal to 1"),
        ({"d_model": -4}, "d_model=-4: input should be greater than or equal to 1"),
        ({"d_model": "12"}, "d_model='12': input should be a valid integer"),
        ({"d_model": 12.0}, r"d_model=12\.0: input should be a valid integer"),
        ({"d_model": True}, "d_model=True: input should be a valid integer"),
        ({"n_layers": None}, "n_layers=None: input should be a valid integer"),
        ({"dropout": 1.0}, r"dropout=1\.0: input should be less than 1"),
        ({"dropout": -0.1}, r"dropout=-0\.1: input should be greater than or equal to 0"),
        ({"norm_eps": 0.0}, r"norm_eps=0\.0: input should be greater than 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan: input should be a finite number"),
        ({"position_offset": -1}, "position_offset=-1: input should be greater than or equal to 0"),
        ({"sliding_window": 0}, "sliding_window=0: input should be greater than or equal to 1"),
        ({"activation": "gelo"}, "activation='gelo': input should be 'relu', 'gelu', 'gelu-tanh' or 'silu'"),
        ({"positions": "rotry"}, "positions='rotry': input should be 'none', 'learned'"),
        ({"family": "bert"}, "family='bert': input should be 'gpt'"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_shows_it(change, message):
    with pytest.raises(ConfigError, match=f"^gpt: {message}") as refused:
        GPTConfig(**{**SMALL, **change})
    assert "\n" not in str(refused.value)


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        GPTConfig(**SMALL).d_model = 24


def test_a_config_takes_keywords_alone():
    with pytest.raises(TypeError, match="positional"):
        GPTConfig(31)


def test_replace_derives_again_what_was_derived():
    config = GPTConfig(**SMALL)
    assert (config.d_ff, config.d_head) == (48, 4)
    wider = config.replace(d_model=24)
    assert (wider.d_ff, wider.d_head) == (96, 8)


def test_replace_keeps_what_was_given():
    assert GPTConfig(**SMALL, d_ff=17).replace(d_model=24).d_ff == 17


def test_replace_checks_anew():
    with pytest.raises(ConfigError, match="d_model=13 must be a multiple of n_heads=3"):
        GPTConfig(**SMALL).replace(d_model=13)
    with pytest.raises(ConfigError, match=r"unknown key 'd_modle'; did you mean 'd_model'\?"):
        GPTConfig(**SMALL).replace(d_modle=24)


def test_configs_are_equal_by_value_and_differ_by_kind():
    assert GPTConfig(**SMALL) == GPTConfig(**SMALL)
    assert GPTConfig(**SMALL) != GPTConfig(**SMALL, dropout=0.1)
    assert RNNConfig(vocab_size=31, d_model=12) != GPTConfig(**SMALL)


def test_nearest_says_nothing_where_nothing_is_near():
    assert nearest("gpt", ["gpt2", "bert"]) == "; did you mean 'gpt2'?"
    assert nearest("zzz", ["gpt2", "bert"]) == ""
    assert nearest("foo", ["one-hot", "toy-head-7"]) == ""  # 0.4 alike
    assert nearest("walk", ["walkthrough", "talk"]) == "; did you mean 'walkthrough'?"
    assert nearest("to", ["toy-head-7"]) == ""


def test_a_message_speaks_of_a_table_of_settings_never_of_a_class():
    with pytest.raises(ConfigError, match=r"^sampling: temperature=-1\.0: input should be greater than or equal to 0$"):
        SamplingConfig(temperature=-1.0)
    with pytest.raises(ConfigError, match=r"^finetuning: unknown key 'epoch'; did you mean 'epochs'\?$"):
        FinetuningSettings(epoch=2)
    with pytest.raises(ConfigError, match=r"^batch=0: input should be"):
        Workload(batch_size=0, seq_len=3)


def test_a_misspelt_key_is_told_before_the_one_it_leaves_missing():
    with pytest.raises(ConfigError, match="unknown key 'vocab_size'; did you mean 'vocab_size'"):
        GPTConfig(vocab_size=512, context_length=64, d_model=32, n_heads=2, n_layers=1)
