"""Config for reading, filtering and batching translation pairs."""

from pydantic import Field

from qkv.config.base import Config, Count, Fraction


class PairsConfig(Config):
    """Translation data settings.

    By default, each line of a file is a tab-separated source and target. If `target_suffix` is set, the source and
    target sentences are in two line-aligned files.
    """

    target_suffix: str | None = Field(default=None, pattern=r"^\.\w+$")
    """Suffix of the target files. With `.en`, the targets of corpus.es.xz are in corpus.en.xz."""
    max_length_ratio: float = Field(default=3.0, gt=1)
    """Drop pairs in which one side is more than this many times as long as the other. Lengths below 12 count as 12."""
    repeat: dict[str, Count] = Field(default_factory=dict)
    """Number of times per epoch that each pair of a file is used (default: 1). The keys are file names in data.train.
    """
    join_fraction: Fraction = 0.1
    """Fraction of batches in which two or three pairs are concatenated into one row, so that the model also learns
    long inputs and several sentences at once."""
    source_vocab_size: Count | None = None
    """Size of a separate source vocabulary, or None for one vocabulary for both languages."""
    n_eval_translations: int = Field(default=200, ge=0)
    """Number of validation pairs to translate and score (BLEU, chrF) at each evaluation."""
