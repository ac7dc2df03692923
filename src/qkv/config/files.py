"""Load and save model configs as JSON or TOML files."""

import json
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from qkv.config.base import did_you_mean_suffix
from qkv.config.families import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import ConfigError

ModelConfig = GPTConfig | BERTConfig | Seq2SeqConfig | RNNConfig

FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt": GPTConfig,
    "bert": BERTConfig,
    "seq2seq": Seq2SeqConfig,
    "rnn": RNNConfig,
}


def config_from_dict(settings: dict[str, Any]) -> ModelConfig:
    """Create a model config from a dictionary. The key `family` selects the config class."""
    family = settings.get("family")
    if family is None:
        raise ConfigError(f"family is missing; available families: {', '.join(FAMILIES)}")
    if not isinstance(family, str) or family not in FAMILIES:
        hint = did_you_mean_suffix(str(family), list(FAMILIES))
        raise ConfigError(f"unknown family {family!r}{hint}; available families: {', '.join(FAMILIES)}")
    return FAMILIES[family](**settings)


def load_config(path: str | Path) -> ModelConfig:
    """Load a model config from a .json or .toml file. The key `family` selects the config class."""
    path = Path(path)
    try:
        settings = _parse_config_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a table of settings, got {type(settings).__name__}")
    try:
        return config_from_dict(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_config(config: ModelConfig, path: str | Path) -> None:
    """Write all fields of a config, including derived defaults, to a .json or .toml file."""
    path = Path(path)
    settings = config.model_dump(mode="json", exclude_none=True)
    match path.suffix:
        case ".json":
            text = json.dumps(settings, indent=2) + "\n"
        case ".toml":
            text = tomli_w.dumps(settings)
        case _:
            raise ConfigError(_unknown_suffix_message(path))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _parse_config_file(path: Path) -> Any:  # noqa: ANN401 - any JSON or TOML value, checked by the caller
    match path.suffix:
        case ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        case ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
        case _:
            raise ConfigError(_unknown_suffix_message(path))


def _unknown_suffix_message(path: Path) -> str:
    return f"{path}: config files must end in .json or .toml, got '{path.suffix}'"
