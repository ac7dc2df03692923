"""Soft dictionary that answers any query with a weighted sum of its values (lecture C's context-sensitive memory)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, ShapeError

Vector = Float[Tensor, " _"]
"""A key, query or value vector. Values may differ in width from keys."""


class SoftMemory:
    """Dictionary whose keys are vectors and whose lookup returns a mix of all values.

    >>> memory = SoftMemory()
    >>> memory[torch.tensor([1.0, 0.0])] = torch.tensor([10.0])
    >>> memory[torch.tensor([0.0, 1.0])] = torch.tensor([20.0])
    >>> memory.lookup(torch.tensor([0.0, 0.0]))
    tensor([15.])
    """

    def __init__(self, *, scaled: bool = True) -> None:
        """Create an empty memory. If `scaled` is true, scores are divided by √width, as in attention."""
        self.scaled = scaled
        self._keys: list[Vector] = []
        self._values: list[Vector] = []

    def __setitem__(self, key: Vector | Sequence[float], value: Vector | Sequence[float]) -> None:
        """Store a value for a key. As in a `dict`, storing an equal key replaces its value."""
        key, value = _to_nonempty_float_vector(key), _to_nonempty_float_vector(value)
        if self._keys:
            _check_width("key", key, len(self._keys[0]))
            _check_width("value", value, len(self._values[0]))
        for i, stored_key in enumerate(self._keys):
            if torch.equal(stored_key, key):
                self._values[i] = value
                return
        self._keys.append(key)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._keys)

    def weights(self, query: Vector | Sequence[float]) -> Float[Tensor, " entry"]:
        """Return the attention weight of each entry, in insertion order. The weights sum to 1."""
        if not self._keys:
            raise InputError("the memory has 0 entries, but a lookup requires at least 1")
        query = _to_nonempty_float_vector(query)
        _check_width("query", query, len(self._keys[0]))
        keys = torch.stack(self._keys)
        scores = keys @ query.to(keys.dtype)
        return torch.softmax(scores / len(query) ** 0.5 if self.scaled else scores, dim=0)

    def lookup(self, query: Vector | Sequence[float]) -> Vector:
        """Return the sum of all values, weighted by `weights(query)`."""
        weights = self.weights(query)
        values = torch.stack(self._values)
        return weights.to(values.dtype) @ values


def _to_nonempty_float_vector(numbers: Vector | Sequence[float]) -> Vector:
    vector = torch.as_tensor(numbers)
    if vector.ndim != 1 or len(vector) == 0:
        raise ShapeError(f"keys, values and queries must be non-empty vectors, got shape {tuple(vector.shape)}")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())


def _check_width(name: str, vector: Vector, expected_width: int) -> None:
    if len(vector) != expected_width:
        raise ShapeError(f"the {name} has width {len(vector)}, but the memory stores width {expected_width}")
