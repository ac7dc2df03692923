"""How published tensors become a model's parameters, and the way back."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkv.errors import WeightsError
from qkv.weights.names import NameTable, Turn

MOST_LISTED = 20


def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], table: NameTable, *, most_faults: int = MOST_LISTED
) -> list[str]:
    """Give every parameter its published value, or change none of them and list what does not fit.

    `most_faults`: so many of each kind; a file of another model differs in hundreds.

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
        raise WeightsError(_sentence(faults, most_faults))
    with torch.no_grad():
        for place in places:
            name = next(table.bare(name) for name in place.names if table.bare(name) in given)
            place.fill(tensors[given[name]])
    return [given[bare] for bare in others]


def published(model: nn.Module, table: NameTable) -> dict[str, Tensor]:
    """A copy of every parameter, by its published name; tied ones once."""
    return {place.names[0]: place.published() for place in _places(model, table)}


def _turned(tensor: Tensor, turn: Turn) -> Tensor:
    """Ours to theirs."""
    match turn:
        case Turn.SAME:
            return tensor
        case Turn.TRANSPOSED:
            return tensor.T
        case Turn.ONE_ROW:
            return tensor[None]


def _turned_back(tensor: Tensor, turn: Turn) -> Tensor:
    return tensor[0] if turn is Turn.ONE_ROW else _turned(tensor, turn)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where one published tensor goes, and the names it may have: several where weights are tied."""

    parameters: list[nn.Parameter]
    turn: Turn
    names: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(parameter.shape[0] for parameter in self.parameters)
        return tuple(_turned(torch.empty(rows, *self.parameters[0].shape[1:], device="meta"), self.turn).shape)

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
        if bad := [("not finite", name) for name, tensor in given.items() if not _is_finite(tensor)]:
            return bad
        first = next(iter(given.values()))
        if not all(torch.equal(first, tensor) for tensor in given.values()):
            return [("tied in the model but different", " and ".join(given))]
        return []

    def fill(self, tensor: Tensor) -> None:
        rows = [parameter.shape[0] for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, _turned_back(tensor, self.turn).split(rows), strict=True):
            parameter.copy_(piece)

    def published(self) -> Tensor:
        return _turned(torch.cat([parameter.detach() for parameter in self.parameters]), self.turn).contiguous()


def _is_finite(tensor: Tensor) -> bool:
    """Smallest and largest tell of NaN and infinity, and no second tensor is made."""
    return all(bool(one.isfinite()) for one in tensor.aminmax())


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


def _sentence(faults: list[tuple[str, str]], most: int) -> str:
    kinds = dict.fromkeys(kind for kind, _ in faults)
    lists = {kind: [text for of, text in faults if of == kind] for kind in kinds}
    return "weights do not fit the model: " + "; ".join(
        f"{len(texts)} {kind}: {_some(texts, most)}" for kind, texts in lists.items()
    )


def _some(texts: list[str], most: int = MOST_LISTED) -> str:
    shown = ", ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"
