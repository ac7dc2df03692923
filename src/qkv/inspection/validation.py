"""Is there such a place? Numbers that a user gives are checked where they enter."""

from qkv.errors import InputError


def check_index(what: str, number: int, n: int, *, of: str, from_end: bool = False) -> int:
    """The number, where it is one of 0 … n − 1; `from_end`: −1 is the last, as in a list."""
    if not (-n if from_end else 0) <= number < n:
        raise InputError(f"{what} {number} is outside the {n:,} {of} (0 … {n - 1})")
    return number % n
