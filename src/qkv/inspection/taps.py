"""Which taps a model has, and which of them a pattern means."""

from fnmatch import fnmatchcase

from torch import nn

from qkv.config.base import suggest_closest
from qkv.errors import TapError
from qkv.nn import Tap


def named_taps(model: nn.Module) -> dict[str, Tap]:
    """Every tap by its name, in the model's order."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Tap)}


def match_taps(model: nn.Module, pattern: str) -> dict[str, Tap]:
    """The taps a name or pattern means: `*` stands for anything, `encoder.*.weights` for all in the encoder."""
    known = named_taps(model)
    found = {name: tap for name, tap in known.items() if fnmatchcase(name, pattern)}
    if not found:
        raise TapError(f"no tap is named '{pattern}'{suggest_closest(pattern, list(known))}; there are {len(known)} taps")
    return found
