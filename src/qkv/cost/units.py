"""Format counts, bytes, FLOPs and durations with unit prefixes."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FLOP_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_COUNT_PREFIXES = ("", "K", "M", "B", "T")
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 31_557_600


def format_count(n: int) -> str:
    """Format a count with the prefixes K, M, B and T, for example 10.7M or 8.0B."""
    number, prefix = _scale_to_unit(n, 1000, _COUNT_PREFIXES)
    return f"{number}{prefix}"


def format_bytes(n: int) -> str:
    """Format a number of bytes with binary units (powers of 1024), for example 1.3 GiB."""
    number, unit = _scale_to_unit(n, 1024, _BYTE_UNITS)
    return f"{number} {unit}"


def format_flops(n: int | float) -> str:
    """Format a number of FLOPs with SI prefixes, for example 2.1 PFLOP."""
    number, prefix = _scale_to_unit(n, 1000, _FLOP_PREFIXES)
    return f"{number} {prefix}FLOP"


def format_duration(seconds: int | float) -> str:
    """Format a duration with at most two significant digits below a year, such as 45 s, 2.8 min, 5.2 h or 12 days."""
    for limit, unit, name in ((2 * _MINUTE, 1, "s"), (2 * _HOUR, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            number = seconds / unit
            return "under 1 s" if number < 1 else f"{number:.2g} {name}" if number < 10 else f"{number:.0f} {name}"
    if seconds < 2 * _YEAR:
        return f"{seconds / _DAY:,.0f} days"
    return f"{seconds / _YEAR:,.0f} years"


def _scale_to_unit(n: int | float, base: int, units: tuple[str, ...]) -> tuple[str, str]:
    """Divide by `base` until the number is less than `base`, and return the formatted number and its unit.

    Numbers that are too large for the last unit are shown with more digits.
    """
    i = 0
    while i + 1 < len(units) and round(n, 1) >= base:
        n, i = n / base, i + 1
    return (f"{n:,.0f}" if i == 0 or n >= 100 else f"{n:.1f}"), units[i]
