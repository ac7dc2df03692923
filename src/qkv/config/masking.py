"""What BERT's pre-training examples are: which words are hidden, and which sentences stand together."""

from math import ceil
from typing import Self

from pydantic import Field, model_validator

from qkv.config.base import Config, Fraction
from qkv.errors import ConfigError


class MaskingConfig(Config):
    """The defaults are the published BERT's (arXiv:1810.04805)."""

    next_sentence: bool = True
    """Two segments, half of them not from one text; off, one segment and the masked words alone."""
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Of all words, those that are asked for."""
    mask_token_fraction: float = Field(default=0.8, ge=0, le=1)
    """Of those asked for: replaced by [MASK]."""
    random_token_fraction: float = Field(default=0.1, ge=0, le=1)
    """Of those asked for: replaced by any word. The rest stays as it is."""
    whole_word_masking: bool = False
    """Hide all pieces of a word or none."""
    short_sequence_fraction: Fraction = 0.1
    """Examples shorter than there is room for, so that short texts are known too."""

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        if self.mask_token_fraction + self.random_token_fraction > 1:
            raise ConfigError(
                f"mask_token_fraction={self.mask_token_fraction} and random_token_fraction={self.random_token_fraction} together are more than 1"
            )
        return self

    @property
    def n_special_tokens(self) -> int:
        """Of a row: [CLS] A [SEP], and B [SEP] where there is one."""
        return 3 if self.next_sentence else 2

    def max_masked_tokens(self, length: int) -> int:
        """Places of a row of `length` tokens where words may be asked for."""
        return max(1, ceil(self.masked_fraction * (length - self.n_special_tokens)))
