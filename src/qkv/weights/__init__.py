"""Load and save model weights in our native format and in published formats.

The exported names are imported lazily so that reading a published config does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.weights.families import config_from_published, to_lossless_published_config
    from qkv.weights.model_loader import load_published_weights, to_published_weights

__all__ = ["config_from_published", "load_published_weights", "to_lossless_published_config", "to_published_weights"]

_MODULES = {
    "config_from_published": "qkv.weights.families",
    "load_published_weights": "qkv.weights.model_loader",
    "to_lossless_published_config": "qkv.weights.families",
    "to_published_weights": "qkv.weights.model_loader",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
