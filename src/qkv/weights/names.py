"""Which published tensor is which of a model's: tables of names, without a tensor among them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Turn(Enum):
    """How a published tensor lies, compared with ours."""

    SAME = "same"
    TRANSPOSED = "transposed"
    """in × out, where torch has out × in (GPT-2)."""
    ONE_ROW = "one row"
    """1 × V, where ours is V (the logits' bias of Marian and BART)."""


@dataclass(frozen=True)
class Rename:
    """One published tensor: ours laid one under another, then turned.

    A table may name parts that a config leaves out (a bias, a head): such a line falls away, and the published
    tensor, should a file hold it, is unexpected. Lines that lead to one and the same parameter are a tie.
    """

    theirs: str
    ours: tuple[str, ...]
    turn: Turn = Turn.SAME


@dataclass(frozen=True, kw_only=True)
class NameTable:
    """Every tensor that a published model of this shape may have."""

    renames: list[Rename]
    prefix: str = ""
    """Stands before the backbone's names; files of a bare backbone leave it off."""
    old_spelling: Mapping[str, str] = field(default_factory=dict)
    """Endings that older files have, and what they are today."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that hold nothing learned: masks, fixed positions, versions."""

    def bare(self, name: str) -> str:
        name = name.removeprefix(self.prefix)
        for old, new in self.old_spelling.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def is_ignored(self, bare_name: str) -> bool:
        return any(re.fullmatch(pattern, bare_name) for pattern in self.ignored)


def linear(theirs: str, ours: str, *, turn: Turn = Turn.SAME) -> list[Rename]:
    """Weight and bias of one part."""
    return [
        Rename(f"{theirs}.weight", (f"{ours}.weight",), turn),
        Rename(f"{theirs}.bias", (f"{ours}.bias",)),
    ]


def layers(theirs: str, ours: str, *, n_layers: int, parts: Mapping[str, str], turn: Turn = Turn.SAME) -> list[Rename]:
    """The same parts in every layer; `{}` in the two names is the layer's number."""
    return [
        rename
        for i in range(n_layers)
        for part, our_part in parts.items()
        for rename in linear(f"{theirs.format(i)}.{part}", f"{ours.format(i)}.{our_part}", turn=turn)
    ]
