"""A recipe: everything a run needs to be made again, in one TOML file."""

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
    """Which tokenizer: one to be trained on the training text, or one that is there (`path`)."""

    kind: TokenizerKind = TokenizerKind.BPE
    vocab_size: Count = 4096
    lowercase: bool = False
    """Fold capitals and accents away, as `uncased` models do."""
    path: str | None = None


class DataConfig(Config):
    """Files, relative to the data folder; `*` stands for any characters of a name."""

    train: tuple[str, ...] = Field(min_length=1)
    validation: tuple[str, ...] = ()
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Without validation files: this share of the text, its end, is kept for validation."""

    @model_validator(mode="after")
    def _check_validation_source(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ConfigError("data: validation files and validation_fraction were both given; choose one")
        return self


class Recipe(Config):
    """Model, tokenizer, data and training. The vocabulary's size comes from the tokenizer."""

    family: Literal["gpt", "bert", "seq2seq", "rnn"]
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: dict[str, Any]
    data: DataConfig
    pairs: PairsConfig | None = Field(default_factory=lambda fields: _default_pairs(fields.get("family", "")))
    """Translation's alone."""
    masking: MaskingConfig | None = Field(default_factory=lambda fields: _default_masking(fields.get("family", "")))
    """BERT's alone."""
    training: TrainingConfig
    init_from: str | None = None
    """A model whose weights the run begins with."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.pairs is not None and _default_pairs(self.family) is None:
            raise ConfigError(f"pairs: is for translation (seq2seq, rnn), and family={self.family!r}")
        if self.masking is not None and _default_masking(self.family) is None:
            raise ConfigError(f"examples: are for bert, and family={self.family!r}")
        if self.training.label_smoothing and self.pairs is None:
            raise ConfigError(
                f"training.label_smoothing={self.training.label_smoothing} is for translation (seq2seq, rnn), "
                f"and family={self.family!r}"
            )
        if not self.training.cross_documents and self.family != "gpt":
            raise ConfigError(f"training.cross_documents=false is for gpt, and family={self.family!r}")
        config = self.build_model_config(self.tokenizer.vocab_size)
        if self.training.seq_len > config.context_length:
            raise ConfigError(
                f"training.seq_len={self.training.seq_len} must not be more than "
                f"model.context_length={config.context_length}"
            )
        return self

    def build_model_config(self, vocab_size: int) -> ModelConfig:
        """The model's config, now that the tokenizer's size is known."""
        if "vocab_size" in self.model:
            raise ConfigError("model.vocab_size is the tokenizer's: set tokenizer.vocab_size")
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
    """A recipe file, with some settings changed: `training.steps=200`."""
    return load_toml_settings(Recipe, Path(path), overrides)


def load_toml_settings(kind: type[C], path: Path, overrides: tuple[str, ...] = ()) -> C:
    """Settings of any kind from a TOML file."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(settings, override)
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is no setting; write name=value, such as training.steps=200")
    *tables, last = name.strip().split(".")
    place = settings
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise ConfigError(f"'{override}': {table} is a value, not a table of settings")
    try:
        place[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[last] = text
