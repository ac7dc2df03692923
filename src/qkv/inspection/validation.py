"""Check indices that users pass."""

from qkv.errors import InputError


def check_index(name: str, index: int, n: int, *, unit: str, from_end: bool = False) -> int:
    """Return the index, or raise an error if it is not between 0 and n − 1.

    If `from_end` is set, negative indices count from the end.
    """
    if not (-n if from_end else 0) <= index < n:
        raise InputError(f"{name} {index} is out of range: there are {n:,} {unit} (0 … {n - 1})")
    return index % n
