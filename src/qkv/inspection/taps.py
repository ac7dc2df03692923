"""Find a model's taps by name or pattern."""

from fnmatch import fnmatchcase

from torch import nn

from qkv.config.base import suggest_closest
from qkv.errors import TapError
from qkv.nn import Tap


def named_taps(model: nn.Module) -> dict[str, Tap]:
    """Returns all taps by name, in the order of the model's modules."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Tap)}


def match_taps(model: nn.Module, pattern: str) -> dict[str, Tap]:
    """Returns the taps that match a name or a pattern, such as `encoder.*.weights` for all attention weights of the
    encoder."""
    known = named_taps(model)
    found = {name: tap for name, tap in known.items() if fnmatchcase(name, pattern)}
    if not found:
        raise TapError(
            f"no tap matches '{pattern}'{suggest_closest(pattern, list(known))} (the model has {len(known)} taps)"
        )
    return found
