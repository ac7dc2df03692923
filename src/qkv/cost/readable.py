"""Large numbers in few characters."""

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FLOP = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_COUNT = ("", "K", "M", "B", "T")
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 31_557_600


def readable_count(n: int) -> str:
    """10.7M, 8.0B."""
    number, prefix = _scaled(n, 1000, _COUNT)
    return f"{number}{prefix}"


def readable_bytes(n: int) -> str:
    """1.3 GiB, by powers of 1024."""
    number, unit = _scaled(n, 1024, _BYTES)
    return f"{number} {unit}"


def readable_flops(n: int | float) -> str:
    """2.1 PFLOP."""
    number, prefix = _scaled(n, 1000, _FLOP)
    return f"{number} {prefix}FLOP"


def readable_time(seconds: int | float) -> str:
    """Two digits at most below a year: 45 s, 3 min, 5.2 h, 12 days."""
    for limit, unit, word in ((2 * _MINUTE, 1, "s"), (2 * _HOUR, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            number = seconds / unit
            return "under 1 s" if number < 1 else f"{number:.2g} {word}" if number < 10 else f"{number:.0f} {word}"
    if seconds < 2 * _YEAR:
        return f"{seconds / _DAY:,.0f} days"
    return f"{seconds / _YEAR:,.0f} years"


def _scaled(n: int | float, base: int, names: tuple[str, ...]) -> tuple[str, str]:
    """Past the last name the number grows instead."""
    i = 0
    while i + 1 < len(names) and round(n, 1) >= base:
        n, i = n / base, i + 1
    return (f"{n:,.0f}" if i == 0 or n >= 100 else f"{n:.1f}"), names[i]
