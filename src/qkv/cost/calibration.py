"""What was measured on a device: seconds of its kernels at a grid of sizes, and of launching them. One JSON file."""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from qkv.config import Config
from qkv.cost.devices import is_called
from qkv.cost.workload import Mode, Precision
from qkv.errors import ConfigError, DiskError, InputError

FORMAT = 3
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Grid = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Table(Config):
    """Seconds at every combination of sizes, the last axis fastest."""

    axes: tuple[tuple[Grid, ...], ...]
    growth: tuple[int, ...] = ()
    """By which power of each size the seconds grow beyond the grid; 1 where not said."""
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if any(not axis or list(axis) != sorted(set(axis)) for axis in self.axes):
            raise ConfigError("a table's axes must grow")
        n = math.prod(len(axis) for axis in self.axes)
        if n != len(self.seconds):
            raise ConfigError(f"a table of {' × '.join(str(len(axis)) for axis in self.axes)} has {len(self.seconds)}")
        if self.growth and len(self.growth) != len(self.axes):
            raise ConfigError(f"a table of {len(self.axes)} axes has {len(self.growth)} powers")
        return self

    @property
    def floor(self) -> float:
        """The smallest measured: what a call costs that has next to nothing to do."""
        return min(self.seconds)

    def at(self, *sizes: int | float) -> float:
        """Between the grid's points by a power law; beyond the largest by `growth`, below the smallest as there."""
        beyond = 1.0
        corners = []
        for axis, power, size in zip(self.axes, self.growth or (1,) * len(self.axes), sizes, strict=True):
            beyond *= max(1.0, size / axis[-1]) ** power
            inside = min(max(size, axis[0]), axis[-1])
            low = min(max(bisect_right(axis, inside) - 1, 0), max(len(axis) - 2, 0))
            high = min(low + 1, len(axis) - 1)
            share = 0.0 if high == low else math.log(inside / axis[low]) / math.log(axis[high] / axis[low])
            corners.append(((low, 1 - share), (high, share)))
        total = 0.0
        for corner in product(*corners):
            weight = math.prod(share for _, share in corner)
            if weight:
                total += weight * math.log(self.seconds[self._place([i for i, _ in corner])])
        return math.exp(total) * beyond

    def _place(self, indices: list[int]) -> int:
        place = 0
        for axis, i in zip(self.axes, indices, strict=True):
            place = place * len(axis) + i
        return place


class Overhead(Config):
    """Seconds the CPU needs to start a step's kernels: of the model, and of each layer."""

    once: float = Field(ge=0, allow_inf_nan=False)
    layer: float = Field(ge=0, allow_inf_nan=False)
    second_layer: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A decoder's, where there are two stacks."""


class Calibration(Config):
    """`tables` by what was timed and how: `product.infer`, `product.train` (forward and backward)."""

    format: int = FORMAT
    device: str
    kind: str
    """cpu or cuda."""
    dtype: Precision
    """Inference's; training on a GPU calibrated at 16 bits is mixed."""
    threads: int = Field(ge=1)
    torch: str
    took: float = Field(ge=0)
    """Seconds that measuring took."""
    tables: dict[str, Table]
    launches: dict[str, Overhead]

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        if self.format != FORMAT:
            raise ConfigError(f"format={self.format}, this version reads format={FORMAT}: calibrate again")
        if self.kind not in ("cpu", "cuda"):
            raise ConfigError(f"kind={self.kind!r} is neither cpu nor cuda")
        return self

    @property
    def is_asynchronous(self) -> bool:
        return self.kind == "cuda"

    @property
    def training_dtype(self) -> Precision:
        return self.dtype.in_training

    def is_of(self, device: str) -> bool:
        """`device`: a full name, a CPU's number of threads in it, or one of the device table's: h200, cpu."""
        return device == self.device or (" " not in device and is_called(device, self.device))

    def check(self, mode: Mode, dtype: Precision) -> None:
        known = self.training_dtype if mode is Mode.TRAIN else self.dtype
        if dtype is not known:
            raise InputError(
                f"the calibration of {self.device} is for {mode.value} at {known.value}, not {dtype.value}"
            )

    def table(self, name: str) -> Table:
        if name not in self.tables:
            raise InputError(f"the calibration of {self.device} has no table '{name}': calibrate again")
        return self.tables[name]

    def launch(self, name: str) -> Overhead:
        if name not in self.launches:
            raise InputError(f"the calibration of {self.device} has no launch '{name}': calibrate again")
        return self.launches[name]


@dataclass
class Measured:
    """A table on its way: filled point by point."""

    axes: tuple[tuple[int | float, ...], ...]
    growth: tuple[int, ...] = ()
    found: dict[tuple[int | float, ...], float] = field(default_factory=dict)

    def table(self) -> Table:
        """Points that were too dear grow from the nearest smaller ones along the axes."""
        seconds: dict[tuple[int | float, ...], float] = {}
        for point in product(*self.axes):
            seconds[point] = self.found[point] if point in self.found else self._grown(point, seconds)
        return Table(axes=self.axes, growth=self.growth, seconds=tuple(seconds.values()))

    def _grown(self, point: tuple[int | float, ...], known: dict[tuple[int | float, ...], float]) -> float:
        guesses = []
        for place, axis in enumerate(self.axes):
            i = axis.index(point[place])
            if i:
                smaller = (*point[:place], axis[i - 1], *point[place + 1 :])
                power = self.growth[place] if self.growth else 1
                guesses.append(known[smaller] * (axis[i] / axis[i - 1]) ** power)
        return min(guesses)


def least(first: Mapping[str, Table], again: Mapping[str, Table]) -> dict[str, Table]:
    """All tables of both; what was measured twice at its least."""
    both = {
        name: one.replace(seconds=tuple(map(min, one.seconds, first[name].seconds))) if name in first else one
        for name, one in again.items()
    }
    return {**first, **both}


def default_path(device: str, dtype: Precision) -> Path:
    """In the user's cache folder; one file a device and precision."""
    cache = os.environ.get("XDG_CACHE_HOME")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return (Path(cache) if cache else Path.home() / ".cache") / "qkv" / f"calibration-{slug}-{dtype.value}.json"


def save_calibration(calibration: Calibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(calibration.model_dump(mode="json")) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from None


def load_calibration(path: Path) -> Calibration:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; make it: qkv cost calibrate") from None
    try:
        settings: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{path}: holds a {type(settings).__name__}, not a calibration")
    try:
        return Calibration(**settings)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None


def known_calibrations() -> list[Path]:
    """Files that `qkv cost calibrate` left in the cache folder, newest first."""
    folder = default_path("any", Precision.FLOAT32).parent
    return sorted(folder.glob("calibration-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def fitting_calibration(mode: Mode, dtype: Precision, *, device: str | None = None) -> Calibration | None:
    """The newest that is for this work, and of this device if said; None: there is none."""
    for path in known_calibrations():
        try:
            found = load_calibration(path)
            found.check(mode, dtype)
        except InputError:
            continue  # of another precision, or of an older version
        if device is None or found.is_of(device):
            return found
    return None
