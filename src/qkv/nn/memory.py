"""A soft dictionary: a look-up that always has an answer. Lecture C's context-sensitive memory."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, ShapeError

Vector = Float[Tensor, " _"]
"""A key, a query or a value; values may be of another width than keys."""


class SoftMemory:
    """Like a `dict` whose keys are vectors and whose answer to any query is a mix of its values.

    >>> memory = SoftMemory()
    >>> memory[torch.tensor([1.0, 0.0])] = torch.tensor([10.0])
    >>> memory[torch.tensor([0.0, 1.0])] = torch.tensor([20.0])
    >>> memory.lookup(torch.tensor([0.0, 0.0]))
    tensor([15.])
    """

    def __init__(self, *, scaled: bool = True) -> None:
        """`scaled`: divide the similarities by √width, as attention does."""
        self.scaled = scaled
        self._keys: list[Vector] = []
        self._values: list[Vector] = []

    def __setitem__(self, key: Vector | Sequence[float], value: Vector | Sequence[float]) -> None:
        """An equal key is replaced, as in a `dict`."""
        key, value = _vector(key), _vector(value)
        if self._keys:
            _same_width("key", key, self._keys[0])
            _same_width("value", value, self._values[0])
        for i, known in enumerate(self._keys):
            if torch.equal(known, key):
                self._values[i] = value
                return
        self._keys.append(key)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._keys)

    def weights(self, query: Vector | Sequence[float]) -> Float[Tensor, " entry"]:
        """How much each entry counts for the query, in the order they were put in; they sum to 1."""
        if not self._keys:
            raise InputError("the memory is empty: 0 entries, a look-up needs at least 1")
        query = _vector(query)
        _same_width("query", query, self._keys[0])
        keys = torch.stack(self._keys)
        scores = keys @ query.to(keys.dtype)
        return torch.softmax(scores / len(query) ** 0.5 if self.scaled else scores, dim=0)

    def lookup(self, query: Vector | Sequence[float]) -> Vector:
        """The values, mixed by `weights(query)`."""
        weights = self.weights(query)
        values = torch.stack(self._values)
        return weights.to(values.dtype) @ values


def _vector(numbers: Vector | Sequence[float]) -> Vector:
    vector = torch.as_tensor(numbers)
    if vector.ndim != 1 or len(vector) == 0:
        raise ShapeError(f"a key, value or query is one vector, not a tensor of shape {tuple(vector.shape)}")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())


def _same_width(what: str, given: Vector, known: Vector) -> None:
    if len(given) != len(known):
        raise ShapeError(f"the {what} has width {len(given)}, the memory's are of width {len(known)}")
