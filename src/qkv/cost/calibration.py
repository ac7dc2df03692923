"""Tables of measured kernel times for a device, stored as JSON."""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qkv.choices import BackendName
from qkv.config import BERTConfig, Config, GPTConfig, ModelConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.workload import Mode, Precision, Workload
from qkv.errors import ConfigError, DiskError, InputError

FORMAT = 5
Family = Literal["gpt", "bert", "seq2seq"]
SHIPPED_FOLDER = Path(__file__).parent / "calibrations"
"""Folder with the calibrations of common devices."""
D_HEAD = 64
"""Width of the attention heads of all reference models."""
REFERENCE_VOCAB_SIZE = 512
"""Vocabulary size of most reference models. One model of each width has a larger vocabulary."""
REFERENCE_LENGTH = 64
"""Tokens per sequence, and keys of a decode step, of the reference steps that determine the time of a layer."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GridSize = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TimingTable(Config):
    """A table of measured times in seconds, with one entry for each combination of sizes.

    The last axis varies fastest.
    """

    axes: tuple[tuple[GridSize, ...], ...]
    exponents: tuple[int, ...] = ()
    """Exponent for each axis that determines how the time grows beyond the grid (default: 1)."""
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _check_axes_and_shape(self) -> Self:
        if any(not axis or list(axis) != sorted(set(axis)) for axis in self.axes):
            raise ConfigError("the sizes on each axis of a timing table must be strictly increasing")
        n = math.prod(len(axis) for axis in self.axes)
        if n != len(self.seconds):
            shape = " × ".join(str(len(axis)) for axis in self.axes)
            raise ConfigError(f"a timing table of shape {shape} must have {n} values, got {len(self.seconds)}")
        if self.exponents and len(self.exponents) != len(self.axes):
            raise ConfigError(
                f"a timing table with {len(self.axes)} axes must have as many exponents, got {len(self.exponents)}"
            )
        return self

    @property
    def min_seconds(self) -> float:
        """The smallest measured time, used as the fixed cost of a call."""
        return min(self.seconds)

    def interpolate(self, *sizes: int | float) -> float:
        """Return the estimated time for arbitrary sizes.

        Between grid points, the time follows a power law (linear interpolation of the logarithms). Above the grid, the
        time grows according to `exponents`. Below the grid, it is constant.
        """
        log_seconds = 0.0
        for weight, seconds in self._weighted_neighbors(sizes, _logarithmic_fraction):
            log_seconds += weight * math.log(seconds)
        return math.exp(log_seconds) * self._growth_above_grid(sizes)

    def interpolate_linearly(self, *sizes: int | float) -> float:
        """Return the estimated time for arbitrary sizes, as a fixed time plus a time proportional to the work.

        Between grid points, the time is linear in each size to the power of its exponent. A power law would
        overestimate it if the time at the smaller grid point is mostly latency.
        """
        neighbors = self._weighted_neighbors(sizes, _linear_fraction)
        return sum(weight * seconds for weight, seconds in neighbors) * self._growth_above_grid(sizes)

    def _growth_above_grid(self, sizes: Sequence[int | float]) -> float:
        """Return the factor by which the time exceeds that of the largest sizes on the grid."""
        growth = 1.0
        for axis, exponent, size in zip(self.axes, self._exponents, sizes, strict=True):
            growth *= max(1.0, size / axis[-1]) ** exponent
        return growth

    def _weighted_neighbors(
        self, sizes: Sequence[int | float], fraction_of_interval: Callable[[float, float, int | float, int], float]
    ) -> Iterator[tuple[float, float]]:
        """Yield the interpolation weight and the time of the grid points around the sizes."""
        corners = []
        for axis, exponent, size in zip(self.axes, self._exponents, sizes, strict=True):
            clamped = min(max(size, axis[0]), axis[-1])
            low = min(max(bisect_right(axis, clamped) - 1, 0), max(len(axis) - 2, 0))
            high = min(low + 1, len(axis) - 1)
            fraction = 0.0 if high == low else fraction_of_interval(axis[low], axis[high], clamped, exponent)
            corners.append(((low, 1 - fraction), (high, fraction)))
        for corner in product(*corners):
            weight = math.prod(fraction for _, fraction in corner)
            if weight:
                yield weight, self.seconds[self._flat_index([i for i, _ in corner])]

    @property
    def _exponents(self) -> tuple[int, ...]:
        return self.exponents or (1,) * len(self.axes)

    def _flat_index(self, indices: list[int]) -> int:
        flat = 0
        for axis, i in zip(self.axes, indices, strict=True):
            flat = flat * len(axis) + i
        return flat


def _logarithmic_fraction(low: float, high: float, size: int | float, _exponent: int) -> float:
    return math.log(size / low) / math.log(high / low)


def _linear_fraction(low: float, high: float, size: int | float, exponent: int) -> float:
    return (size**exponent - low**exponent) / (high**exponent - low**exponent)


class LaunchOverhead(Config):
    """CPU time in seconds to launch the kernels of a step."""

    base: float = Field(ge=0, allow_inf_nan=False)
    """Seconds spent outside the layers."""
    per_layer: float = Field(ge=0, allow_inf_nan=False)
    """Seconds per layer, or per encoder layer in models with an encoder and a decoder."""
    per_decoder_layer: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds per decoder layer in models with an encoder and a decoder."""


class ReferenceStep(Config):
    """The measured time of one step of a reference model."""

    family: Family
    mode: Mode
    d_model: int = Field(ge=1)
    n_layers: int = Field(ge=1)
    """Number of layers, or of decoder layers in an encoder–decoder."""
    n_encoder_layers: int = Field(default=0, ge=0)
    vocab_size: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    seq_len: int = Field(ge=1)
    source_len: int | None = None
    seconds: float = Field(gt=0, allow_inf_nan=False)

    def config(self) -> ModelConfig:
        """Return the config of the reference model."""
        length = max(self.seq_len, self.source_len or 1) + REFERENCE_LENGTH
        shape: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "context_length": length,
            "d_model": self.d_model,
            "n_heads": self.d_model // D_HEAD,
        }
        match self.family:
            case "gpt":
                return GPTConfig(**shape, n_layers=self.n_layers)
            case "bert":
                is_trained = self.mode is Mode.TRAIN
                return BERTConfig(**shape, n_layers=self.n_layers, masked_lm_head=is_trained, pooler=False)
            case "seq2seq":
                return Seq2SeqConfig(**shape, n_encoder_layers=self.n_encoder_layers, n_decoder_layers=self.n_layers)

    def workload(self, dtype: Precision) -> Workload:
        """Return the workload of the step. Training uses the corresponding training precision."""
        return Workload(
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            source_len=self.source_len,
            mode=self.mode,
            dtype=dtype.training_precision if self.mode is Mode.TRAIN else dtype,
        )


class Calibration(Config):
    """Measured times of each backend on a device.

    The eager backend is calibrated kernel by kernel, with `tables` and `launch_overheads`. Each table name combines a
    kernel with a pass: `matmul.infer` (forward only) or `matmul.train` (forward and backward). Every faster backend is
    calibrated with complete steps of reference models (`reference_steps`).
    """

    format: int = FORMAT
    device: str
    kind: str
    """Device type: `cpu` or `cuda`."""
    dtype: Precision
    """Precision for inference. A GPU that is calibrated in 16 bits trains in mixed precision."""
    n_threads: int = Field(ge=1)
    torch_version: str
    date: str | None = None
    """Date of the calibration, as YYYY-MM-DD."""
    duration: float = Field(ge=0)
    """Seconds that the calibration took."""
    tables: dict[str, TimingTable]
    launch_overheads: dict[str, LaunchOverhead]
    reference_steps: dict[BackendName, tuple[ReferenceStep, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_format_and_kind(self) -> Self:
        if self.format != FORMAT:
            raise ConfigError(f"format must be {FORMAT}, got {self.format}; run `qkv cost calibrate` again")
        if self.kind not in ("cpu", "cuda"):
            raise ConfigError(f"kind must be cpu or cuda, got {self.kind!r}")
        return self

    @property
    def is_asynchronous(self) -> bool:
        """True if the device can compute while the CPU launches further kernels."""
        return self.kind == "cuda"

    @property
    def training_dtype(self) -> Precision:
        return self.dtype.training_precision

    @property
    def device_and_date(self) -> str:
        return self.device if self.date is None else f"{self.device}, {self.date}"

    def is_for_device(self, device: str) -> bool:
        """Return True if `device` is the calibrated device, given its full name or a short name such as h200 or cpu."""
        return device == self.device or (" " not in device and matches_device(device, self.device))

    def check_precision(self, mode: Mode, dtype: Precision) -> None:
        """Raise `InputError` if the calibration does not support this combination of mode and precision."""
        calibrated = self.training_dtype if mode is Mode.TRAIN else self.dtype
        if dtype is not calibrated:
            raise InputError(
                f"the calibration of {self.device} covers mode={mode.value} only with dtype={calibrated.value}, got "
                f"dtype={dtype.value}"
            )

    def check_kernels(self, config: ModelConfig, mode: Mode) -> None:
        """Raise `InputError` if the norm or the activation of a model was added to qkv after the calibration."""
        if isinstance(config, TransformerConfig):
            for kind in (config.norm, config.activation):
                self.get_table(f"{kind.value}.{mode.pass_name}")

    def get_reference_steps(self, backend: str, family: str, mode: Mode) -> tuple[ReferenceStep, ...]:
        """Return the reference steps of a backend, or an empty tuple if it runs the kernels of the eager backend."""
        steps = self.reference_steps.get(BackendName(backend), ())
        return tuple(step for step in steps if step.family == family and step.mode is mode)

    def get_table(self, name: str) -> TimingTable:
        if name not in self.tables:
            raise InputError(f"the calibration of {self.device} has no table '{name}'; run `qkv cost calibrate` again")
        return self.tables[name]

    def get_launch_overhead(self, name: str) -> LaunchOverhead:
        if name not in self.launch_overheads:
            raise InputError(
                f"the calibration of {self.device} has no launch overhead '{name}'; run `qkv cost calibrate` again"
            )
        return self.launch_overheads[name]


def matches_device(name: str, full_name: str) -> bool:
    """Return True if a short name such as h200 matches a full device name such as NVIDIA H200."""
    return re.search(rf"{re.escape(name)}(?!\d)", full_name.lower().replace(" ", "")) is not None


@dataclass
class TimingTableBuilder:
    """A builder that collects measurements for a `TimingTable`.

    Points that are too expensive to measure may be omitted.
    """

    axes: tuple[tuple[int | float, ...], ...]
    exponents: tuple[int, ...] = ()
    measured: dict[tuple[int | float, ...], float] = field(default_factory=dict)

    def build(self) -> TimingTable:
        """Build the table, extrapolating missing points from the next smaller sizes."""
        seconds: dict[tuple[int | float, ...], float] = {}
        for point in product(*self.axes):
            seconds[point] = (
                self.measured[point] if point in self.measured else self._min_extrapolation_over_axes(point, seconds)
            )
        return TimingTable(axes=self.axes, exponents=self.exponents, seconds=tuple(seconds.values()))

    def _min_extrapolation_over_axes(
        self, point: tuple[int | float, ...], seconds: dict[tuple[int | float, ...], float]
    ) -> float:
        """Extrapolate the time along each axis and return the smallest result."""
        candidates = []
        for dim, axis in enumerate(self.axes):
            i = axis.index(point[dim])
            if i:
                smaller = (*point[:dim], axis[i - 1], *point[dim + 1 :])
                exponent = self.exponents[dim] if self.exponents else 1
                candidates.append(seconds[smaller] * (axis[i] / axis[i - 1]) ** exponent)
        return min(candidates)


def merge_fastest(first: Mapping[str, TimingTable], second: Mapping[str, TimingTable]) -> dict[str, TimingTable]:
    """Merge two sets of tables. If a table is in both sets, keep the smaller time at each point."""
    merged = {
        name: table.replace(seconds=tuple(map(min, table.seconds, first[name].seconds))) if name in first else table
        for name, table in second.items()
    }
    return {**first, **merged}


def default_calibration_path(device: str, dtype: Precision) -> Path:
    """Return the default path of a calibration file in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return (Path(cache) if cache else Path.home() / ".cache") / "qkv" / f"calibration-{slug}-{dtype.value}.json"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the calibration to a JSON file and create missing parent folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(calibration.model_dump(mode="json")) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}") from None


def load_calibration(path: Path) -> Calibration:
    """Read a calibration from a JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; create a calibration with `qkv cost calibrate`"
        ) from None
    try:
        settings: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(
            f"{path}: must contain a JSON object (the calibration of a device), got {type(settings).__name__}"
        )
    try:
        return Calibration(**settings)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None


def list_calibrations() -> list[Path]:
    """List the calibration files in the cache folder, newest first."""
    folder = default_calibration_path("any", Precision.FLOAT32).parent
    return sorted(folder.glob("calibration-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def find_newest_calibration(
    config: ModelConfig,
    mode: Mode,
    dtype: Precision,
    *,
    device: str | None = None,
    log: Callable[[str], None] = lambda _message: None,
) -> Calibration | None:
    """Return the newest calibration for the given model, mode, precision and device, or None if there is none.

    If a device is given, a calibration that is shipped with qkv is used as a fallback. `log` receives a message for
    each calibration that is skipped only because it lacks the model's norm or activation.
    """
    shipped = [] if device is None else sorted(SHIPPED_FOLDER.glob("calibration-*.json"))
    for path in [*list_calibrations(), *shipped]:
        try:
            calibration = load_calibration(path)
            calibration.check_precision(mode, dtype)
        except InputError:
            continue  # the file is for another precision or was written by an older version
        if device is not None and not calibration.is_for_device(device):
            continue
        try:
            calibration.check_kernels(config, mode)
        except InputError as error:
            log(f"{path} is not used: {error}")
            continue
        return calibration
    return None
