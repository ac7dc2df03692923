"""Provide a short `repr` for dataclasses that contain tensors and long lists."""

from dataclasses import fields, is_dataclass

from torch import Tensor

MAX_CHARS = 60
"""The maximum number of characters per field."""


class ShortRepr:
    """A mixin for dataclasses (with `repr=False`) that shows only the shapes of tensors and lengths of long lists."""

    def __repr__(self) -> str:
        assert is_dataclass(self)
        fields_text = ", ".join(f"{field.name}={_short_repr(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({fields_text})"


def _short_repr(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<{'×'.join(str(size) for size in value.shape)}>"
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | Tensor):
        return f"[{len(value)} × {_short_repr(value[0])}]"
    text = repr(value).partition("\n")[0]
    if len(text) <= MAX_CHARS or isinstance(value, ShortRepr):
        return text
    return f"[{value[0]!r}, … {len(value)} in all]" if isinstance(value, list | tuple) else f"{text[:MAX_CHARS]}…"
