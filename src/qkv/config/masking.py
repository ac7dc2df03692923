"""Settings for creating BERT's pre-training examples: token masking and next-sentence pairs."""

from math import ceil
from typing import Self

from pydantic import Field, model_validator

from qkv.config.base import Config, Fraction
from qkv.errors import ConfigError


class MaskingConfig(Config):
    """Settings for masked language modeling and next-sentence prediction. The defaults match arXiv:1810.04805."""

    next_sentence: bool = True
    """Use pairs of segments. If False, use single segments.

    In half of the pairs, the two segments come from different documents.
    """
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of tokens to predict."""
    mask_token_fraction: float = Field(default=0.8, ge=0, le=1)
    """Fraction of the predicted tokens that are replaced with [MASK]."""
    random_token_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the predicted tokens that are replaced with a random token.

    The remaining predicted tokens are unchanged.
    """
    whole_word_masking: bool = False
    """Mask all tokens of a word together."""
    short_sequence_fraction: Fraction = 0.1
    """Fraction of examples to shorten so that the model also sees texts below the maximum length."""

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        if self.mask_token_fraction + self.random_token_fraction > 1:
            raise ConfigError(
                f"the sum of mask_token_fraction and random_token_fraction must not exceed 1, got "
                f"mask_token_fraction={self.mask_token_fraction} and "
                f"random_token_fraction={self.random_token_fraction}"
            )
        return self

    @property
    def n_special_tokens(self) -> int:
        """Number of special tokens per row: two in [CLS] A [SEP], or three in [CLS] A [SEP] B [SEP]."""
        return 3 if self.next_sentence else 2

    def max_masked_tokens(self, seq_len: int) -> int:
        """Return the maximum number of tokens to predict in a row of `seq_len` tokens."""
        return max(1, ceil(self.masked_fraction * (seq_len - self.n_special_tokens)))
