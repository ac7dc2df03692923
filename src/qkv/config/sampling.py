"""How the next token is chosen from its probabilities, or a whole text by search."""

from typing import Self

from pydantic import Field, model_validator

from qkv.config.base import Config, Count
from qkv.errors import ConfigError


class SamplingConfig(Config):
    """Each setting off unless given; they apply in this order: repetition, temperature, then the filters."""

    temperature: float = Field(default=1.0, ge=0)
    """0: always the likeliest (greedy). Below 1 sharper, above 1 flatter."""
    top_k: Count | None = None
    """Only the k likeliest."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Only the fewest whose probabilities reach p together."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Only those at least this share as likely as the likeliest."""
    typical_p: float | None = Field(default=None, gt=0, le=1)
    """Only the fewest, nearest to the expected surprise, that reach p together (arXiv:2202.00666)."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Above 1, what was said becomes less likely: positive logits are divided, negative ones multiplied."""
    seed: int = Field(default=0, ge=0)


class BeamConfig(Config):
    """Search instead of chance: the likeliest text that a few running guesses can find."""

    n_beams: int = Field(ge=1, le=1024)
    """Running guesses; 1 is greedy. Each has a cache: more than these help no text, and fill a machine's memory."""
    n_best: Count = 1
    """How many texts to give back."""
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    """A text's score is Σ log p ÷ length^this: 0 favours short ones, 1 is the mean, more favours long ones."""
    min_new_tokens: int = Field(default=0, ge=0)
    """A text may not end before it has so many tokens."""
    no_repeat_ngram_size: Count | None = None
    """No n tokens in a row come twice."""

    @model_validator(mode="after")
    def _check_n_best(self) -> Self:
        if self.n_best > self.n_beams:
            raise ConfigError(f"n_best={self.n_best} must be at most n_beams={self.n_beams}")
        return self
