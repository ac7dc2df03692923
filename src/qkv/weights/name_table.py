"""Tables that map published tensor names to the parameter names of our models."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Layout(Enum):
    """Layout of a published tensor compared with our parameter."""

    SAME = "same"
    TRANSPOSED = "transposed"
    """(in, out) instead of torch's (out, in), as in GPT-2."""
    SINGLE_ROW = "single row"
    """(1, vocab_size) instead of (vocab_size,), as in the logit bias of Marian and BART."""


@dataclass(frozen=True)
class NameMapping:
    """Maps a published tensor to one or more parameters, which are concatenated and then converted to its layout.

    A table may contain parameters that a config does not have, such as a bias or a head. These entries are skipped, and
    the published tensor is reported as unexpected if a file contains it. Several entries with the same parameter
    describe tied weights.
    """

    published: str
    parameters: tuple[str, ...]
    layout: Layout = Layout.SAME


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """All tensors that a published model of a given config may contain."""

    mappings: list[NameMapping]
    prefix: str = ""
    """Prefix of the tensor names of the backbone. Files that contain only the backbone omit the prefix."""
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Suffixes used by older files, mapped to the current ones."""
    ignored_patterns: tuple[str, ...] = ()
    """Patterns of tensors that are not learned, such as masks, fixed positions and version numbers."""

    def canonical_name(self, name: str) -> str:
        """Remove the prefix and replace legacy suffixes."""
        name = name.removeprefix(self.prefix)
        for legacy, current in self.legacy_suffixes.items():
            if name.endswith(legacy):
                return name.removesuffix(legacy) + current
        return name

    def is_ignored(self, canonical_name: str) -> bool:
        return any(re.fullmatch(pattern, canonical_name) for pattern in self.ignored_patterns)


def weight_and_bias_mappings(published: str, module: str, *, layout: Layout = Layout.SAME) -> list[NameMapping]:
    """Map the weight and bias of a module."""
    return [
        NameMapping(f"{published}.weight", (f"{module}.weight",), layout),
        NameMapping(f"{published}.bias", (f"{module}.bias",)),
    ]


def linear_mappings_per_layer(
    published: str, module: str, *, n_layers: int, parts: Mapping[str, str], layout: Layout = Layout.SAME
) -> list[NameMapping]:
    """Map the weights and biases of the same parts in every layer. `{}` in both names stands for the layer index."""
    return [
        mapping
        for i in range(n_layers)
        for published_part, part in parts.items()
        for mapping in weight_and_bias_mappings(
            f"{published.format(i)}.{published_part}", f"{module.format(i)}.{part}", layout=layout
        )
    ]
