"""Configs for sampling and beam search."""

from typing import Self

from pydantic import Field, model_validator

from qkv.config.base import Config, Count
from qkv.errors import ConfigError


class SamplingConfig(Config):
    """Settings for sampling. They are applied in this order: repetition penalty, temperature, filters.

    The defaults sample from the unmodified distribution.
    """

    temperature: float = Field(default=1.0, ge=0)
    """Number by which the logits are divided.

    Values below 1 sharpen the distribution, values above 1 flatten it, and 0 is greedy decoding.
    """
    top_k: Count | None = None
    """Sample only from the k most likely tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample only from the smallest set of tokens whose total probability is at least p."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample only from tokens with at least this fraction of the probability of the most likely token."""
    typical_p: float | None = Field(default=None, gt=0, le=1)
    """Sample only from tokens whose surprisal is closest to the entropy, up to a total probability of p.

    This is typical sampling (arXiv:2202.00666).
    """
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Factor by which the positive logits of earlier tokens are divided and the negative ones multiplied.

    Values above 1 discourage repetition.
    """
    seed: int = Field(default=0, ge=0)
    """Random seed."""


class BeamConfig(Config):
    """Settings for beam search."""

    n_beams: int = Field(ge=1, le=1024)
    """Number of beams. 1 selects greedy search.

    The limit of 1024 bounds memory use because each beam needs its own KV cache.
    """
    n_best: Count = 1
    """Number of sequences to return per input."""
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    """Exponent of the length in the score Σ log p / length^penalty.

    0 favors short sequences, and 1 ranks sequences by their mean log p.
    """
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum number of new tokens before a sequence may end."""
    no_repeat_ngram_size: Count | None = None
    """Size of n-grams that must not occur twice in a sequence."""

    @model_validator(mode="after")
    def _check_n_best(self) -> Self:
        if self.n_best > self.n_beams:
            raise ConfigError(f"n_best must not exceed n_beams, got n_best={self.n_best} and n_beams={self.n_beams}")
        return self
