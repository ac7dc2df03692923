"""Convert views to JSON-compatible values."""

from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

from torch import Tensor


def to_jsonable(value: Any) -> Any:  # noqa: ANN401, PLR0911 - any view, and each kind its own answer
    """Convert a view to JSON-compatible values.

    Tensors become nested lists, dataclasses become dictionaries, and non-finite numbers become `None`.
    """
    match value:
        case Tensor():
            return to_jsonable(value.tolist())
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case dict():
            return {str(key): to_jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [to_jsonable(item) for item in value]
        case _ if is_dataclass(value):
            return {field.name: to_jsonable(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value
