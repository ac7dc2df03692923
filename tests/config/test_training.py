"""Defaults and checks of training configs."""

import pytest

from qkv.config import TrainingConfig
from qkv.errors import ConfigError


def config(**changes):
    return TrainingConfig(**{"steps": 200, "batch_size": 12, "seq_len": 7} | changes)


def test_defaults_are_derived_from_other_fields():
    assert config().micro_batch_size == 12
    assert config(eval_every=7).save_every == 7
    assert config().replace(batch_size=5).micro_batch_size == 5


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"micro_batch_size": 5}, "batch_size=12 .*micro_batch_size=5"),
        ({"steps": 99}, "warmup_steps=100 .*steps=99"),
        ({"ema_decay": 0.9, "lora_rank": 2}, "ema_decay .*lora_rank"),
        ({"optimizer": "muon", "layer_decay": 0.9}, "layer_decay .*'adamw'.*'muon'"),
        ({"steps": 0}, r"steps=0: .*\b1\b"),
        ({"learning_rate": 0}, r"learning_rate=0: .*\b0\b"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"decay_fraction": 1.5}, r"decay_fraction=1\.5"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"learning_rat": 0.1}, "'learning_rat'.*'learning_rate'"),
    ],
)
def test_the_error_for_invalid_settings_is_one_line(changes, pattern):
    with pytest.raises(ConfigError, match=pattern) as error:
        config(**changes)
    assert "\n" not in str(error.value)
