"""Weights from elsewhere and for elsewhere: published names and settings, outside of the models."""

from qkv.weights.published import config_from_published, load_published, published_from_config, to_published

__all__ = ["config_from_published", "load_published", "published_from_config", "to_published"]
