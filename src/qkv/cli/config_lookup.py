"""Find the model config for a preset, file, folder or shipped model without loading weights.

This module imports torch only if the format of the config requires it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import ConfigError, InputError

if TYPE_CHECKING:
    from qkv.config import ModelConfig


def resolve_model_config(name: str) -> "ModelConfig":
    """Load the config of a preset, config file, run folder, model folder (native or Hugging Face) or shipped model."""
    from qkv.config import PRESETS, preset
    from qkv.config.base import did_you_mean_suffix
    from qkv.zoo import shipped_model_folders

    path = Path(name)
    if path.is_file():
        return _load_config_file(path)
    if path.is_dir() and (config_file := _find_model_or_checkpoint_config(path)) is not None:
        return _load_config_file(config_file)
    if name in PRESETS:
        return preset(name)
    shipped_models = shipped_model_folders()
    if name in shipped_models:
        return _load_config_file(shipped_models[name] / "config.json")
    if path.is_dir():
        raise InputError(f"{name}: the folder contains neither a config.json nor checkpoints of a run")
    hint = did_you_mean_suffix(name, [*PRESETS, *shipped_models])
    raise InputError(
        f"{name}: is not a preset, file, folder or shipped model{hint}; available presets: {', '.join(PRESETS)}"
    )


def _find_model_or_checkpoint_config(folder: Path) -> Path | None:
    """Return the path of the config.json in a model folder or, for a run, in its last checkpoint."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    return max((folder / "checkpoints").glob("*/config.json"), default=None)


def _load_config_file(path: Path) -> "ModelConfig":
    from qkv.config import load_config

    if path.suffix != ".json" or not _is_hugging_face_config(path):
        return load_config(path)
    from qkv.weights.families import config_from_published

    try:
        return config_from_published(json.loads(path.read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _is_hugging_face_config(path: Path) -> bool:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # load_config raises an error that describes the problem
    return isinstance(settings, dict) and "family" not in settings and "model_type" in settings
