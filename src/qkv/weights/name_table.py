"""Tables that map published tensor names to the parameter names in our models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Layout(Enum):
    """The layout of a published tensor relative to our parameter."""

    SAME = "same"
    TRANSPOSED = "transposed"
    """The published shape is (in, out) instead of torch's (out, in). GPT-2 uses this layout."""
    SINGLE_ROW = "single row"
    """The published shape is (1, vocab_size) instead of (vocab_size,). Marian's and BART's logit biases use it."""


@dataclass(frozen=True)
class NameMapping:
    """A mapping from a published tensor to one or more of our parameters.

    The published tensor is the concatenation of the parameters, converted to `layout`. If a model has no such parameter
    (for example, no bias or head), the mapping is skipped, and the published tensor is reported as unexpected if a file
    contains it. Several mappings with the same parameters represent tied weights.
    """

    published: str
    parameters: tuple[str, ...]
    layout: Layout = Layout.SAME


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """A table of all tensors that a published model with a given config may contain."""

    mappings: list[NameMapping]
    prefix: str = ""
    """The prefix of the backbone's tensor names. Files that contain only the backbone omit this prefix."""
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    """A map from suffixes in older files to the current suffixes."""
    ignored_patterns: tuple[str, ...] = ()
    """Patterns for the names of tensors that are not learned, such as masks, fixed positions and version numbers."""


def weight_and_bias_mappings(published: str, module: str, *, layout: Layout = Layout.SAME) -> list[NameMapping]:
    """Return the name mappings for the weight and bias of a module."""
    return [
        NameMapping(f"{published}.weight", (f"{module}.weight",), layout),
        NameMapping(f"{published}.bias", (f"{module}.bias",)),
    ]


def linear_mappings_per_layer(
    published: str, module: str, *, n_layers: int, parts: Mapping[str, str], layout: Layout = Layout.SAME
) -> list[NameMapping]:
    """Return the name mappings for the weights and biases in every layer. `{}` in a name stands for the layer index.

    `parts` maps the published name of each module in a layer to our name.
    """
    return [
        mapping
        for i in range(n_layers)
        for published_part, part in parts.items()
        for mapping in weight_and_bias_mappings(
            f"{published.format(i)}.{published_part}", f"{module.format(i)}.{part}", layout=layout
        )
    ]
