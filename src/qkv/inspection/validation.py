"""Check indices passed by users."""

from qkv.errors import InputError


def check_index(what: str, number: int, n: int, *, of: str, from_end: bool = False) -> int:
    """Returns the index if it is in 0 … n − 1. With `from_end`, negative indices count from the end."""
    if not (-n if from_end else 0) <= number < n:
        raise InputError(f"{what} {number} is out of range: there are {n:,} {of} (0 … {n - 1})")
    return number % n
