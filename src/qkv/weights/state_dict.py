"""Convert published tensors to model parameters and back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkv.errors import WeightsError
from qkv.weights.name_table import Layout, NameTable

MAX_LISTED = 20


def load_into(
    model: nn.Module, tensors: Mapping[str, Tensor], table: NameTable, *, max_listed: int = MAX_LISTED
) -> list[str]:
    """Copy published tensors into the parameters of a model.

    If any tensor does not match, no parameter is changed, and the error lists up to `max_listed` problems of each kind.
    A file for a different model may have hundreds of problems. Returns the names of the tensors that were ignored
    because they are not learned.
    """
    targets = _build_load_targets(model, table)
    file_names = _file_names_by_canonical_name(tensors, table)
    expected = {_canonical_name(table, name) for target in targets for name in target.alternative_names}
    others = [name for name in file_names if name not in expected]
    problems = [
        ("unexpected", f"{file_names[name]} {tuple(tensors[file_names[name]].shape)}")
        for name in others
        if not any(re.fullmatch(pattern, name) for pattern in table.ignored_patterns)
    ]
    for target in targets:
        names = [
            file_names[_canonical_name(table, name)]
            for name in target.alternative_names
            if _canonical_name(table, name) in file_names
        ]
        problems += target.find_problems_with_kind({name: tensors[name] for name in names})
    if problems:
        raise WeightsError(_summarize_problems_by_kind(problems, max_listed))
    with torch.no_grad():
        for target in targets:
            canonical = (_canonical_name(table, name) for name in target.alternative_names)
            target.load(tensors[next(file_names[name] for name in canonical if name in file_names)])
    return [file_names[name] for name in others]


def to_published_state(model: nn.Module, table: NameTable) -> dict[str, Tensor]:
    """Return copies of all parameters, keyed by their published names. Tied parameters are included once."""
    return {target.alternative_names[0]: target.to_published_tensor() for target in _build_load_targets(model, table)}


def _to_published_layout(tensor: Tensor, layout: Layout) -> Tensor:
    match layout:
        case Layout.SAME:
            return tensor
        case Layout.TRANSPOSED:
            return tensor.T
        case Layout.SINGLE_ROW:
            return tensor[None]


def _from_published_layout(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor[0] if layout is Layout.SINGLE_ROW else _to_published_layout(tensor, layout)


@dataclass(frozen=True, kw_only=True)
class _LoadTarget:
    """The parameters into which one published tensor is loaded, and the tensor's possible names.

    A tied weight has several names.
    """

    parameters: list[nn.Parameter]
    layout: Layout
    alternative_names: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published tensor."""
        rows = sum(parameter.shape[0] for parameter in self.parameters)
        combined = torch.empty(rows, *self.parameters[0].shape[1:], device="meta")
        return tuple(_to_published_layout(combined, self.layout).shape)

    def find_problems_with_kind(self, tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Return a (kind, description) pair for each problem with the tensor.

        `tensors` contains the tensor under each of its names in the file.
        """
        if not tensors:
            return [("missing", f"{self.alternative_names[0]} {self.shape}")]
        problems = [
            ("with the wrong shape", f"{name} has {tuple(tensor.shape)}, expected {self.shape}")
            for name, tensor in tensors.items()
            if tuple(tensor.shape) != self.shape
        ]
        problems += [
            ("not floating-point", f"{name} is {tensor.dtype}")
            for name, tensor in tensors.items()
            if not tensor.is_floating_point()
        ]
        if problems:
            return problems
        if non_finite := [("not finite", name) for name, tensor in tensors.items() if not _is_finite(tensor)]:
            return non_finite
        first = next(iter(tensors.values()))
        if not all(torch.equal(first, tensor) for tensor in tensors.values()):
            return [("tied in the model but different", " and ".join(tensors))]
        return []

    def load(self, tensor: Tensor) -> None:
        rows = [parameter.shape[0] for parameter in self.parameters]
        parts = _from_published_layout(tensor, self.layout).split(rows)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part)

    def to_published_tensor(self) -> Tensor:
        combined = torch.cat([parameter.detach() for parameter in self.parameters])
        return _to_published_layout(combined, self.layout).contiguous()


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    Checking only the minimum and maximum avoids allocating a mask as large as the tensor.
    """
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _build_load_targets(model: nn.Module, table: NameTable) -> list[_LoadTarget]:
    """Return one load target for each published tensor that the model has parameters for.

    Entries of the table with the same parameters (tied weights) are merged.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta:
        raise WeightsError(
            f"{len(on_meta)} parameters are on the meta device and have no data (for example {on_meta[0]})"
        )
    targets: dict[tuple[int, ...], _LoadTarget] = {}
    mapped: set[str] = set()
    for mapping in table.mappings:
        if not all(name in parameters for name in mapping.parameters):
            continue
        mapped.update(mapping.parameters)
        mapping_parameters = [parameters[name] for name in mapping.parameters]
        target = targets.setdefault(
            tuple(id(parameter) for parameter in mapping_parameters),
            _LoadTarget(parameters=mapping_parameters, layout=mapping.layout, alternative_names=[]),
        )
        target.alternative_names.append(mapping.published)
    unmapped = [name for name in parameters if name not in mapped]
    if unmapped:
        raise WeightsError(
            f"{len(unmapped)} of {len(parameters)} parameters have no Hugging Face name: {_join_first(unmapped)}"
        )
    return list(targets.values())


def _file_names_by_canonical_name(tensors: Mapping[str, Tensor], table: NameTable) -> dict[str, str]:
    """Return a map from canonical tensor names to the names in the file."""
    file_names: dict[str, str] = {}
    for name in tensors:
        canonical = _canonical_name(table, name)
        if canonical in file_names:
            raise WeightsError(f"the file contains the same tensor twice: {file_names[canonical]} and {name}")
        file_names[canonical] = name
    return file_names


def _canonical_name(table: NameTable, name: str) -> str:
    """Return a tensor name without the prefix and with the current suffix."""
    name = name.removeprefix(table.prefix)
    for legacy, current in table.legacy_suffixes.items():
        if name.endswith(legacy):
            return name.removesuffix(legacy) + current
    return name


def _summarize_problems_by_kind(problems: list[tuple[str, str]], max_listed: int) -> str:
    by_kind: dict[str, list[str]] = {}
    for kind, description in problems:
        by_kind.setdefault(kind, []).append(description)
    return "the weights do not match the model: " + "; ".join(
        f"{len(descriptions)} {kind}: {_join_first(descriptions, max_listed)}" for kind, descriptions in by_kind.items()
    )


def _join_first(items: list[str], max_listed: int = MAX_LISTED) -> str:
    listed = ", ".join(items[:max_listed])
    return listed if len(items) <= max_listed else f"{listed} and {len(items) - max_listed} more"
