"""How the next token is chosen from its probabilities."""

from pydantic import Field

from qkv.config.base import Config, Count


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
