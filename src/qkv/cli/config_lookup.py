"""Which config a name, file or folder means to `qkv cost`, read without weights and, where it can be, without torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import ConfigError, InputError

if TYPE_CHECKING:
    from qkv.config import ModelConfig


def config_of(name: str) -> "ModelConfig":
    """A preset, a config file, a run, a model's folder (ours or Hugging Face's), or a shipped model."""
    from qkv.config import PRESETS, preset
    from qkv.config.base import suggest_closest
    from qkv.zoo import shipped

    path = Path(name)
    if path.is_file():
        return _from_file(path)
    if path.is_dir() and (found := _config_in(path)) is not None:
        return _from_file(found)
    if name in PRESETS:
        return preset(name)
    zoo = shipped()
    if name in zoo:
        return _from_file(zoo[name] / "config.json")
    if path.is_dir():
        raise InputError(f"{name}: the folder holds neither config.json nor a run (checkpoints/)")
    hint = suggest_closest(name, [*PRESETS, *zoo])
    raise InputError(
        f"{name}: neither a preset nor a file, a folder or a shipped model{hint}; presets: {', '.join(PRESETS)}"
    )


def _config_in(folder: Path) -> Path | None:
    """A run's is that of its last checkpoint: all are of one shape."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    return max((folder / "checkpoints").glob("*/config.json"), default=None)


def _from_file(path: Path) -> "ModelConfig":
    from qkv.config import load_config

    if path.suffix != ".json" or not _is_published(path):
        return load_config(path)
    from qkv.weights.families import config_from_published

    try:
        return config_from_published(json.loads(path.read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _is_published(path: Path) -> bool:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # load_config says what is wrong with it
    return isinstance(settings, dict) and "family" not in settings and "model_type" in settings
