"""Published weights into a model of ours, and ours to be published."""

from collections.abc import Mapping

from torch import Tensor

from qkv.models import Model
from qkv.weights.families import name_table, published_from_config
from qkv.weights.tensors import fill, published


def load_published(model: Model, tensors: Mapping[str, Tensor]) -> list[str]:
    """Give every parameter its published value, or change none and raise `WeightsError` with all that is wrong.

    Returns the names that were left out because they hold nothing learned (stored masks, fixed positions).
    """
    return fill(model, tensors, name_table(model.config))


def to_published(model: Model) -> dict[str, Tensor]:
    """A copy of every weight, by the name others know it by; tied weights once."""
    published_from_config(model.config)
    return published(model, name_table(model.config))
