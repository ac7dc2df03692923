"""Check indices passed by users."""

from qkv.errors import InputError


def check_index(name: str, index: int, n: int, *, unit: str, from_end: bool = False) -> int:
    """Returns the index if it is in 0 … n − 1. With `from_end`, negative indices count from the end."""
    if not (-n if from_end else 0) <= index < n:
        raise InputError(f"{name} {index} is out of range: there are {n:,} {unit} (0 … {n - 1})")
    return index % n
