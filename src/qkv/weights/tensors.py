"""How published tensors become a model's parameters, and the way back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from qkv.errors import WeightsError


class Turn(Enum):
    """How a published tensor lies, compared with ours."""

    SAME = "same"
    TRANSPOSED = "transposed"
    """in × out, where torch has out × in (GPT-2)."""
    ONE_ROW = "one row"
    """1 × V, where ours is V (the logits' bias of Marian and BART)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Ours to theirs."""
        match self:
            case Turn.SAME:
                return tensor
            case Turn.TRANSPOSED:
                return tensor.T
            case Turn.ONE_ROW:
                return tensor[None]

    def back(self, tensor: Tensor) -> Tensor:
        return tensor[0] if self is Turn.ONE_ROW else self(tensor)


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


def fill(model: nn.Module, tensors: Mapping[str, Tensor], table: NameTable) -> list[str]:
    """Give every parameter its published value, or change none of them and list all that does not fit.

    Returns the names that were left out because they hold nothing learned.
    """
    places = _places(model, table)
    given = _by_bare_name(tensors, table)
    known = {table.bare(name) for place in places for name in place.names}
    others = [bare for bare in given if bare not in known]
    faults = [("unexpected", f"{given[bare]} {tuple(tensors[given[bare]].shape)}")
              for bare in others if not table.is_ignored(bare)]  # fmt: skip
    for place in places:
        names = [given[table.bare(name)] for name in place.names if table.bare(name) in given]
        faults += place.faults({name: tensors[name] for name in names})
    if faults:
        raise WeightsError(_sentence(faults))
    with torch.no_grad():
        for place in places:
            name = next(table.bare(name) for name in place.names if table.bare(name) in given)
            place.fill(tensors[given[name]])
    return [given[bare] for bare in others]


def published(model: nn.Module, table: NameTable) -> dict[str, Tensor]:
    """A copy of every parameter, by its published name; tied ones once."""
    return {place.names[0]: place.published() for place in _places(model, table)}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where one published tensor goes, and the names it may have: several where weights are tied."""

    parameters: list[nn.Parameter]
    turn: Turn
    names: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(parameter.shape[0] for parameter in self.parameters)
        return tuple(self.turn(torch.empty(rows, *self.parameters[0].shape[1:], device="meta")).shape)

    def faults(self, given: dict[str, Tensor]) -> list[tuple[str, str]]:
        """`given`: this place's tensor, under each of its names that the file has."""
        if not given:
            return [("missing", f"{self.names[0]} {self.shape}")]
        misshapen = [
            ("misshapen", f"{name} is {tuple(tensor.shape)}, must be {self.shape}")
            for name, tensor in given.items()
            if tuple(tensor.shape) != self.shape
        ]
        whole = [
            ("not floating-point", f"{name} is {tensor.dtype}")
            for name, tensor in given.items()
            if not tensor.is_floating_point()
        ]
        if misshapen or whole:
            return misshapen + whole
        first = next(iter(given.values()))
        if not all(torch.equal(first, tensor) for tensor in given.values()):
            return [("tied in the model but different", " and ".join(given))]
        return []

    def fill(self, tensor: Tensor) -> None:
        rows = [parameter.shape[0] for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, self.turn.back(tensor).split(rows), strict=True):
            parameter.copy_(piece)

    def published(self) -> Tensor:
        return self.turn(torch.cat([parameter.detach() for parameter in self.parameters])).contiguous()


def _places(model: nn.Module, table: NameTable) -> list[_Place]:
    """The table's lines that this model has; tied lines are one place, of which the first line names the tensor."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta:
        raise WeightsError(f"{len(on_meta)} parameters have no memory (meta device), {on_meta[0]} the first")
    places: dict[tuple[int, ...], _Place] = {}
    covered: set[str] = set()
    for rename in table.renames:
        if not all(name in parameters for name in rename.ours):
            continue
        covered.update(rename.ours)
        mine = [parameters[name] for name in rename.ours]
        place = places.setdefault(
            tuple(id(parameter) for parameter in mine),
            _Place(parameters=mine, turn=rename.turn, names=[]),
        )
        place.names.append(rename.theirs)
    homeless = [name for name in parameters if name not in covered]
    if homeless:
        raise WeightsError(f"{len(homeless)} of {len(parameters)} parameters have no published name: {_some(homeless)}")
    return list(places.values())


def _by_bare_name(tensors: Mapping[str, Tensor], table: NameTable) -> dict[str, str]:
    """Bare name → the name in the file."""
    given: dict[str, str] = {}
    for name in tensors:
        bare = table.bare(name)
        if bare in given:
            raise WeightsError(f"the file names one tensor twice: {given[bare]} and {name}")
        given[bare] = name
    return given


def _sentence(faults: list[tuple[str, str]]) -> str:
    kinds = dict.fromkeys(kind for kind, _ in faults)
    lists = {kind: [text for of, text in faults if of == kind] for kind in kinds}
    return "weights do not fit the model: " + "; ".join(
        f"{len(texts)} {kind}: {_some(texts)}" for kind, texts in lists.items()
    )


def _some(texts: list[str]) -> str:
    """Up to twenty: a file of another model differs in hundreds."""
    shown = ", ".join(texts[:20])
    return shown if len(texts) <= 20 else f"{shown} and {len(texts) - 20} more"
