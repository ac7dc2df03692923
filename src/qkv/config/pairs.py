"""How translation pairs are read, cleaned and joined."""

from pydantic import Field

from qkv.config.base import Config, Count, Fraction


class PairsConfig(Config):
    """A file holds source⇥target a line; or, with `target_suffix`, one language, and the file beside it the other."""

    target_suffix: str | None = Field(default=None, pattern=r"^\.\w+$")
    """`.en`: the targets of corpus.es (or corpus.es.xz) stand, line by line, in corpus.en (corpus.en.xz)."""
    max_length_ratio: float = Field(default=3.0, gt=1)
    """Pairs with one side longer than so many times the other are dropped; a side counts as 12 characters at least."""
    repeat: dict[str, Count] = Field(default_factory=dict)
    """How often an epoch takes each pair of a training file, by the file's name in data.train; 1 unless said."""
    join_fraction: Fraction = 0.1
    """Share of the batches in which two or three pairs stand one after the other as one, so that long inputs and
    several sentences are learnt too."""
    source_vocab_size: Count | None = None
    """A vocabulary of its own for the source; None: one for both languages."""
    n_eval_translations: int = Field(default=200, ge=0)
    """Validation pairs that are translated and scored (BLEU, chrF) at each evaluation."""
