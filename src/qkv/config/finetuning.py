"""How a model is fine-tuned on labelled texts; what is None is chosen from the sizes of data and model."""

from pathlib import Path
from typing import Literal, Self

import tomli_w
from pydantic import Field, model_validator

from qkv.choices import Precision, ProblemType
from qkv.config.base import Config, Count, Fraction
from qkv.config.recipe import load_toml_settings
from qkv.errors import ConfigError


class FinetuningSettings(Config):
    """How, whatever the model and the data."""

    text_columns: tuple[str, ...] = Field(default=(), max_length=2)
    """Columns of the text, or of the pair's two; none: `text`, else `text_a` and `text_b`."""
    label_column: str | None = None
    problem_type: ProblemType = ProblemType.SINGLE_LABEL
    n_train_rows: Count | None = None
    """Learn from so many rows alone, drawn anew for each seed, each class by its share."""
    truncate: bool = False
    """Cut what is longer than the context; otherwise that is an error."""

    from_scratch: bool = False
    """The model's shape alone, with random weights."""
    freeze: Literal["all"] | int = 0
    """The embeddings and this many of the lowest layers learn nothing; `all`: only the head learns. 0: all learn."""
    lora_rank: Count | None = None
    layer_decay: float | None = Field(default=None, gt=0, le=1)

    n_seeds: Count = 1
    """How many runs, from `seed` on; they differ in the head's first weights, the order of the rows, and dropout."""
    seed: int = Field(default=0, ge=0)
    epochs: Count | None = None
    batch_size: Count | None = None
    learning_rate: float | None = Field(default=None, gt=0)
    dropout: Fraction = 0.1
    patience: Count | None = 5
    """Stop after this many evaluations without a better one; there are ten in a run."""
    precision: Precision = Precision.AUTO
    compile: bool = False

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if isinstance(self.freeze, int) and self.freeze < 0:
            raise ConfigError(f"freeze={self.freeze} must be a number of layers, or 'all'")
        if self.freeze and self.lora_rank is not None:
            raise ConfigError("lora_rank freezes all weights but its own; freeze cannot be used with it")
        if self.from_scratch and (self.freeze or self.lora_rank is not None):
            raise ConfigError("from_scratch starts with random weights: none of them may be frozen (freeze, lora_rank)")
        return self


class FinetuningConfig(FinetuningSettings):
    """Models, data and settings of one or more runs: each model is fine-tuned with each seed."""

    models: tuple[str, ...] = Field(min_length=1)
    """Names, as every command takes them."""
    train: str
    evaluation: str | None = None
    """None: a tenth of the training rows is held out."""

    @model_validator(mode="after")
    def _check_models_differ(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ConfigError(f"models={list(self.models)}: each may be there once")
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_finetuning(path: Path, overrides: tuple[str, ...] = ()) -> FinetuningConfig:
    """A file of settings, some of them changed: `epochs=2`."""
    return load_toml_settings(FinetuningConfig, path, overrides)
