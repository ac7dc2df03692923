"""Weights from elsewhere and for elsewhere: published names and settings, outside of the models.

Each name is imported when first used: a published config is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.weights.families import config_from_published, published_from_config
    from qkv.weights.published import load_published, to_published

__all__ = ["config_from_published", "load_published", "published_from_config", "to_published"]

_HOME = {
    "config_from_published": "qkv.weights.families",
    "load_published": "qkv.weights.published",
    "published_from_config": "qkv.weights.families",
    "to_published": "qkv.weights.published",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
