"""Training settings: what follows from what, and what cannot be."""

import pytest

from qkv.config import TrainingConfig
from qkv.errors import ConfigError


def config(**changes):
    return TrainingConfig(**{"steps": 200, "batch_size": 12, "seq_len": 7} | changes)


def test_what_is_not_given_follows_from_what_is():
    assert config().micro_batch_size == 12
    assert config(eval_every=7).save_every == 7
    assert config().replace(batch_size=5).micro_batch_size == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 5}, "batch_size=12 must be a multiple of micro_batch_size=5"),
        ({"steps": 99}, "warmup_steps=100 must not be more than steps=99"),
        ({"ema_decay": 0.9, "lora_rank": 2}, "ema_decay and lora_rank cannot be used together"),
        ({"optimizer": "muon", "layer_decay": 0.9}, "layer_decay is for optimizer='adamw'"),
        ({"steps": 0}, "steps=0: input should be greater than or equal to 1"),
        ({"learning_rate": 0}, "learning_rate=0: input should be greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"learning_rat": 0.1}, "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes, message):
    with pytest.raises(ConfigError) as refused:
        config(**changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
