"""A model's folder: config.json, model.safetensors (one file or shards), tokenizer.json. Ours, or Hugging Face's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.config import config_from_dict
from qkv.errors import InputError, QKVError, WeightsError
from qkv.models import Model, build
from qkv.text import Tokenizer, load_tokenizer
from qkv.weights.folder import read_tensors
from qkv.weights.published import config_from_published, load_published
from qkv.weights.tensors import NameTable, Rename, fill

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Loaded:
    """A model ready for use (`eval`), and its tokenizer where the folder has one."""

    model: Model
    tokenizer: Tokenizer | None


def load_model(folder: Path) -> Loaded:
    """`config.json` says which kind it is: `family` for ours, `model_type` for Hugging Face's."""
    settings = read_settings(folder / "config.json")
    tensors = read_weights(folder)
    try:
        if "family" in settings:
            model = build(config_from_dict(settings))
            load_own(model, tensors)
        else:
            model = build(config_from_published(settings, tensors))
            load_published(model, tensors)
    except QKVError as error:
        raise type(error)(f"{folder}: {error}") from None
    tokenizer = _tokenizer(folder)
    if tokenizer is not None and tokenizer.vocabulary_size > model.config.vocabulary_size:
        raise WeightsError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary_size} ids, the model {model.config.vocabulary_size}"
        )
    return Loaded(model.eval(), tokenizer)


def load_own(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Weights under our own names; tied ones may be named once."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    fill(model, tensors, NameTable(renames=[Rename(name, (name,)) for name in names]))


def read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise WeightsError(f"{path}: holds a {type(settings).__name__}, not a table of settings")
    return settings


def read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).is_file():
        return read_tensors(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{folder / pickled[0]}: pickled weights can run code when opened, so they are not; "
            "save them anew with `save_pretrained(folder, safe_serialization=True)`"
        )
    raise WeightsError(f"{folder}: holds neither {SINGLE} nor {INDEX}")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_settings(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(part, str) for pair in index.items() for part in pair):
        raise WeightsError(f"{folder / INDEX}: weight_map must be a table of tensor name to file name")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        if Path(shard).name != shard:
            raise WeightsError(f"{folder / INDEX}: '{shard}' points outside the folder")
        tensors |= read_tensors(folder / shard)
    if tensors.keys() != index.keys():
        odd = sorted(tensors.keys() ^ index.keys())
        raise WeightsError(
            f"{folder / INDEX}: lists {len(index)} tensors, the shards hold {len(tensors)}; {odd[0]} is odd"
        )
    return tensors


def _tokenizer(folder: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "vocab.json", "vocab.txt")
    return load_tokenizer(folder) if any((folder / name).is_file() for name in names) else None


def device_of(model: Model) -> torch.device:
    return next(model.parameters()).device


def needs_tokenizer(loaded: Loaded, folder: Path) -> Tokenizer:
    if loaded.tokenizer is None:
        raise InputError(f"{folder}: has no tokenizer (tokenizer.json, vocab.json or vocab.txt)")
    return loaded.tokenizer
