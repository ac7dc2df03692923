"""Settings for fine-tuning on labeled texts, for classification or regression."""

from pathlib import Path
from typing import Literal, Self

import tomli_w
from pydantic import Field, model_validator

from qkv.choices import Precision, ProblemType
from qkv.config.base import Config, Count, Fraction
from qkv.config.recipe import load_toml_settings
from qkv.errors import ConfigError


class FinetuningSettings(Config):
    """Fine-tuning settings that do not depend on the model or the data files.

    If epochs, batch_size or learning_rate is None, a value is chosen based on the size of the data and the model.
    """

    text_columns: tuple[str, ...] = Field(default=(), max_length=2)
    """Name of the text column, or of the two columns of a text pair (default: `text`, or `text_a` and `text_b`)."""
    label_column: str | None = None
    """Name of the label column (default: `label`, or `score` for regression if that column exists)."""
    problem_type: ProblemType = ProblemType.SINGLE_LABEL
    """Kind of classification problem."""
    n_train_rows: Count | None = None
    """Number of rows in the stratified random training sample, or None to train on all rows.

    A separate sample is drawn for each seed.
    """
    truncate: bool = False
    """Truncate texts that exceed the context length. If False, an error is raised for such texts."""

    from_scratch: bool = False
    """Use only the model's architecture and start from random weights."""
    freeze: Literal["all"] | int = 0
    """Number of lowest layers to freeze along with the embeddings, or `all` to train only the head.

    If 0, nothing is frozen.
    """
    lora_rank: Count | None = None
    """Rank of the LoRA adapters, or None to train the weights directly."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Ratio of each layer's learning rate to that of the layer above it, or None for equal learning rates."""

    n_seeds: Count = 1
    """Number of runs, which use consecutive seeds.

    The runs differ in head initialization, row order and dropout.
    """
    seed: int = Field(default=0, ge=0)
    """First random seed."""
    epochs: Count | None = None
    """Number of passes over the training rows."""
    batch_size: Count | None = None
    """Number of rows per optimizer update."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate."""
    dropout: Fraction = 0.1
    """Dropout probability."""
    patience: Count | None = 5
    """Stop after this many evaluations without improvement. Each run has ten evaluations."""
    precision: Precision = Precision.AUTO
    """Numeric precision used for training."""
    compile: bool = False
    """Compile the training step with torch.compile."""

    @model_validator(mode="after")
    def _check_freezing_and_lora(self) -> Self:
        if isinstance(self.freeze, int) and self.freeze < 0:
            raise ConfigError(f"freeze must be 'all' or a non-negative number of layers, got {self.freeze}")
        if self.freeze and self.lora_rank is not None:
            raise ConfigError("freeze cannot be combined with lora_rank, which already freezes the original weights")
        if self.from_scratch and (self.freeze or self.lora_rank is not None):
            raise ConfigError(
                "from_scratch cannot be combined with freeze or lora_rank because all random weights must be trained"
            )
        return self


class FinetuningConfig(FinetuningSettings):
    """Models, data files and settings for a fine-tuning experiment. Each model is fine-tuned with each seed."""

    models: tuple[str, ...] = Field(min_length=1)
    """Model names or folders."""
    train: str
    """File with labeled training rows."""
    evaluation: str | None = None
    """File with labeled evaluation rows, or None to hold out a tenth of the training rows."""

    @model_validator(mode="after")
    def _check_models_differ(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ConfigError(f"models must not contain duplicates, got {list(self.models)}")
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_finetuning(path: Path, overrides: tuple[str, ...] = ()) -> FinetuningConfig:
    """Load a fine-tuning config from a TOML file and apply overrides such as `epochs=2`."""
    return load_toml_settings(FinetuningConfig, path, overrides)
