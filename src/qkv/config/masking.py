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
    hidden_share: float = Field(default=0.15, gt=0, lt=1)
    """Of all words, those that are asked for."""
    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Of those asked for: replaced by [MASK]."""
    random_share: float = Field(default=0.1, ge=0, le=1)
    """Of those asked for: replaced by any word. The rest stays as it is."""
    whole_words: bool = False
    """Hide all pieces of a word or none."""
    short_share: Fraction = 0.1
    """Examples shorter than there is room for, so that short texts are known too."""

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.mask_share + self.random_share > 1:
            raise ConfigError(
                f"mask_share={self.mask_share} and random_share={self.random_share} together are more than 1"
            )
        return self

    @property
    def n_specials(self) -> int:
        """Of a row: [CLS] A [SEP], and B [SEP] where there is one."""
        return 3 if self.next_sentence else 2

    def n_slots(self, length: int) -> int:
        """Places of a row of `length` tokens where words may be asked for."""
        return max(1, ceil(self.hidden_share * (length - self.n_specials)))
