"""Load published weights into our models, and export our weights with their published names."""

from collections.abc import Mapping

from torch import Tensor

from qkv.models import Model
from qkv.weights.families import name_table_for, to_lossless_published_config
from qkv.weights.state_dict import load_into, to_published_state


def load_published_weights(model: Model, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load published tensors into a model.

    If any tensor does not match, a `WeightsError` is raised and the model is unchanged. Returns the names of the
    tensors that were ignored because they are not learned (stored masks and fixed positions).
    """
    return load_into(model, tensors, name_table_for(model.config))


def to_published_weights(model: Model) -> dict[str, Tensor]:
    """Return copies of all weights, keyed by their published names. Tied weights are included once."""
    to_lossless_published_config(model.config)  # raises an error if the config has no published form
    return to_published_state(model, name_table_for(model.config))
