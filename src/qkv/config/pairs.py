"""Config for reading, filtering and batching translation pairs."""

from pydantic import Field

from qkv.config.base import Config, Count, Fraction


class PairsConfig(Config):
    """Settings for translation data.

    By default, each line of a file contains a source sentence and a target sentence, separated by a tab. If
    `target_suffix` is set, the source and target sentences are in two line-aligned files.
    """

    target_suffix: str | None = Field(default=None, pattern=r"^\.\w+$")
    """Suffix of the target files. For example, `.en` means that the targets for corpus.es.xz are in corpus.en.xz."""
    max_length_ratio: float = Field(default=3.0, gt=1)
    """Maximum ratio between the lengths of the two sides of a pair. Pairs with a higher ratio are dropped.

    Lengths below 12 characters count as 12.
    """
    repeat: dict[str, Count] = Field(default_factory=dict)
    """Number of times that each pair in a file is used per epoch (default: 1), keyed by file name in data.train."""
    join_fraction: Fraction = 0.1
    """Fraction of batches in which each row contains two or three concatenated pairs.

    These batches teach the model to translate long inputs and several sentences at once.
    """
    source_vocab_size: Count | None = None
    """Size of a separate source vocabulary, or None to use a single vocabulary for both languages."""
    n_eval_translations: int = Field(default=200, ge=0)
    """Number of validation pairs to translate and score (BLEU, chrF) at each evaluation."""
