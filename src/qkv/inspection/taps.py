"""Find a model's taps by name or pattern."""

from fnmatch import fnmatchcase

from torch import nn

from qkv.config.base import did_you_mean_suffix
from qkv.errors import TapError
from qkv.nn import Tap


def named_taps(model: nn.Module) -> dict[str, Tap]:
    """Return all taps, keyed by name, in the order of the model's modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Tap)}


def match_taps(model: nn.Module, pattern: str) -> dict[str, Tap]:
    """Return the taps that match a name or a pattern, such as `encoder.*.weights`, keyed by name."""
    all_taps = named_taps(model)
    matches = {name: tap for name, tap in all_taps.items() if fnmatchcase(name, pattern)}
    if not matches:
        hint = did_you_mean_suffix(pattern, list(all_taps))
        raise TapError(f"none of the model's {len(all_taps)} taps matches '{pattern}'{hint}")
    return matches
