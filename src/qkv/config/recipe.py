"""Training recipes, which contain model, tokenizer, data and training settings in one TOML file."""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import tomli_w
from pydantic import Field, model_validator

from qkv.choices import TokenizerKind
from qkv.config.base import Config, Count
from qkv.config.files import ModelConfig, config_from_dict
from qkv.config.masking import MaskingConfig
from qkv.config.pairs import PairsConfig
from qkv.config.training import TrainingConfig
from qkv.errors import ConfigError

C = TypeVar("C", bound=Config)


class TokenizerConfig(Config):
    """Settings for the tokenizer, which is either trained on the training text or loaded from `path`."""

    kind: TokenizerKind = TokenizerKind.BPE
    """Tokenization algorithm."""
    vocab_size: Count = 4096
    """Maximum number of token ids, including special tokens."""
    lowercase: bool = False
    """Convert text to lowercase and, for WordPiece, remove accents (as in `uncased` models)."""
    path: str | None = None
    """Path of an existing tokenizer to use instead of training one."""


class DataConfig(Config):
    """Data files for training and validation. Paths are relative to the data folder and may contain `*`."""

    train: tuple[str, ...] = Field(min_length=1)
    """Training files."""
    validation: tuple[str, ...] = ()
    """Validation files."""
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the training text to hold out for validation if there are no validation files.

    The held-out part is taken from the end of the text.
    """

    @model_validator(mode="after")
    def _check_validation_source(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ConfigError("data: validation and validation_fraction cannot be combined")
        return self


class Recipe(Config):
    """All settings needed to reproduce a training run. The tokenizer determines the model's vocabulary size."""

    family: Literal["gpt", "bert", "seq2seq", "rnn"]
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: dict[str, Any]
    data: DataConfig
    pairs: PairsConfig | None = Field(default_factory=lambda fields: _default_pairs(fields.get("family", "")))
    """Settings for translation data (seq2seq and rnn only)."""
    masking: MaskingConfig | None = Field(default_factory=lambda fields: _default_masking(fields.get("family", "")))
    """Settings for masking (bert only)."""
    training: TrainingConfig
    init_from: str | None = None
    """Model whose weights are used to initialize the run."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.pairs is not None and _default_pairs(self.family) is None:
            raise ConfigError(f"pairs is only valid for family='seq2seq' or 'rnn', got family={self.family!r}")
        if self.masking is not None and _default_masking(self.family) is None:
            raise ConfigError(f"masking is only valid for family='bert', got family={self.family!r}")
        if self.training.label_smoothing and self.pairs is None:
            raise ConfigError(
                f"training.label_smoothing={self.training.label_smoothing} is only valid for family='seq2seq' "
                f"or 'rnn', got family={self.family!r}"
            )
        if not self.training.cross_documents and self.family != "gpt":
            raise ConfigError(
                f"training.cross_documents=false is only valid for family='gpt', got family={self.family!r}"
            )
        config = self.build_model_config(self.tokenizer.vocab_size)
        if self.training.seq_len > config.context_length:
            raise ConfigError(
                f"training.seq_len must not exceed model.context_length, got training.seq_len={self.training.seq_len} "
                f"and model.context_length={config.context_length}"
            )
        return self

    def build_model_config(self, vocab_size: int) -> ModelConfig:
        """Create the model config for a vocabulary of `vocab_size` tokens."""
        if "vocab_size" in self.model:
            raise ConfigError(
                "model.vocab_size cannot be set because the tokenizer determines it; set tokenizer.vocab_size instead"
            )
        settings = {**self.model, "family": self.family, "vocab_size": vocab_size}
        if self.pairs is not None and self.pairs.source_vocab_size is not None:
            settings["source_vocab_size"] = self.pairs.source_vocab_size
        if self.masking is not None:
            heads = {"masked_lm_head": True, "next_sentence_head": self.masking.next_sentence}
            settings = {**heads, **settings}
        return config_from_dict(settings)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def _default_pairs(family: str) -> PairsConfig | None:
    return PairsConfig() if family in ("seq2seq", "rnn") else None


def _default_masking(family: str) -> MaskingConfig | None:
    return MaskingConfig() if family == "bert" else None


def load_recipe(path: str | Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Load a recipe file and apply overrides such as `training.steps=200`."""
    return load_toml_settings(Recipe, Path(path), overrides)


def load_toml_settings(kind: type[C], path: Path, overrides: tuple[str, ...] = ()) -> C:
    """Load a config of type `kind` from a TOML file and apply overrides such as `training.steps=200`."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid TOML: {error}") from None
    for override in overrides:
        _apply_override(settings, override)
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"invalid override '{override}': expected NAME=VALUE, for example training.steps=200")
    *tables, key = name.strip().split(".")
    target = settings
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"invalid override '{override}': {table} is a single value, not a table of settings")
    try:
        target[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A value that is not valid TOML is treated as an unquoted string, as in schedule=linear.
        target[key] = text
