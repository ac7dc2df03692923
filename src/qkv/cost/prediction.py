"""How long a step will take on a calibrated device: what was measured of its kernels, put together.

A CPU does one thing after another: launching plus the kernels' own time. A GPU computes while the CPU launches, so
the slower of the two counts, phase by phase; the logits come last and hide behind nothing. A recurrence waits for
itself and is added.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from qkv.choices import CellKind, Kernel, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.calibration import Calibration
from qkv.cost.memory import cache_bytes
from qkv.cost.operation import LOGITS, LOSS, Operation
from qkv.cost.operations import operations
from qkv.cost.parameters import parameters
from qkv.cost.workload import Mode, Precision, Workload

PLAIN = "plain"
"""A GPT's launching without the fused kernel, as a name of the calibration."""
ODD = 8
"""A matrix whose rows are no multiple of this many numbers is read more slowly by a GPU, up to eight times."""
NEAR = {"cpu": 2**24, "cuda": 2**27}
"""Bytes of weights that a product is calibrated with: a core's own cache, and a GPU's, does not hold them."""
NARROW = ("output", "contract")
"""Products that read what another 16-bit kernel wrote; the others read the residual stream's 32 bits."""
FORWARD_SHARE = 1 / 3
"""Of a training step's products: one in three is the forward pass's."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one operation, all its runs; forward and backward in training."""

    part: str
    name: str
    runs: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """`launching` is the CPU's, `computing` the device's; `serial` waits for neither."""

    seconds: float
    launching: float
    computing: float
    serial: float
    spent: tuple[Spent, ...]

    @property
    def bound_by(self) -> str:
        return "launching" if self.launching > self.computing + self.serial else "computing"

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds, "launching": self.launching, "computing": self.computing, "serial": self.serial,
        }  # fmt: skip


def predict(config: ModelConfig, work: Workload, calibration: Calibration) -> Prediction:
    """One step's time, or a generation's; refused where the calibration is for another precision."""
    calibration.check(work.mode, work.dtype)
    if work.mode is Mode.GENERATE:
        return _generation(config, work, calibration)
    meter = _Meter(config, work, calibration)
    spent = tuple(meter.spent())
    serial = sum((one.seconds for one in spent if one.name == "recurrence"), 0.0)
    computing = sum(one.seconds for one in spent) - serial
    whole = _launching(config, work, calibration)
    if calibration.is_asynchronous:
        # The loss and the gradients' norm are looked at before the update: its launching begins with an idle device.
        *passes, update = _phases(config, work, calibration, spent)
        seconds = _overlapped(passes) + max(update) + serial
    else:
        seconds = whole + computing + serial
    return Prediction(seconds=seconds, launching=whole, computing=computing, serial=serial, spent=spent)


def _generation(config: ModelConfig, work: Workload, calibration: Calibration) -> Prediction:
    """The prompt's pass, then as many steps, each at the mean length: a step's time grows evenly with it."""
    prompt = predict(config, work.replace(mode=Mode.PREFILL, new=None, predictions=1), calibration)
    middle = (work.length + 1 + work.last_length) // 2
    step = predict(config, work.replace(mode=Mode.DECODE, new=None, length=max(1, middle)), calibration)
    n = work.last_length - work.length
    names = ("seconds", "launching", "computing", "serial")
    sums = {name: getattr(prompt, name) + n * getattr(step, name) for name in names}
    steps = [replace(one, runs=n * one.runs, seconds=n * one.seconds) for one in step.spent]
    return Prediction(**sums, spent=(*prompt.spent, *steps))


def launch_name(config: ModelConfig) -> str:
    """Models whose layers are launched alike share a name."""
    match config:
        case RNNConfig():
            return "rnn"
        case BERTConfig():
            return "bert"
        case Seq2SeqConfig():
            return "seq2seq"
        case GPTConfig():
            return "rotary" if config.positions is PositionKind.ROTARY else "gpt"


def _launching(config: ModelConfig, work: Workload, calibration: Calibration, *, part: str = "") -> float:
    """`part` of a training step: `_forward`, or `_gradients` for all but the update."""
    what = f"{work.mode.value}{part}"
    launch = calibration.launch(f"{launch_name(config)}.{what}")
    match config:
        case RNNConfig() | Seq2SeqConfig():
            layers = config.n_encoder_layers * launch.layer + config.n_decoder_layers * launch.second_layer
        case BERTConfig() | GPTConfig():
            layers = config.n_layers * launch.layer
    if work.kernel is Kernel.PLAIN:
        plain, fused = (calibration.launch(f"{name}.{what}").layer for name in (PLAIN, "gpt"))
        layers += max(0.0, plain - fused) * _n_attentions(config, work)
    return launch.once + layers


def _n_attentions(config: ModelConfig, work: Workload) -> int:
    match config:
        case RNNConfig():
            return 0
        case Seq2SeqConfig():
            return 2 * config.n_decoder_layers + (0 if work.mode is Mode.DECODE else config.n_encoder_layers)
        case BERTConfig() | GPTConfig():
            return config.n_layers


def _phases(
    config: ModelConfig, work: Workload, calibration: Calibration, spent: tuple[Spent, ...]
) -> list[tuple[float, float]]:
    """(launching, computing) of an encoder, what follows it, the head with its loss, backward, an update."""
    whole = behind = ahead = _launching(config, work, calibration)
    launch = f"{launch_name(config)}.{work.mode.value}"
    timed = [one for one in spent if one.name != "recurrence"]
    update = sum((one.seconds for one in timed if one.part == "optimizer"), 0.0)
    head = sum(one.seconds for one in timed if one.name == LOGITS or one.part == LOSS)
    encoder = sum(one.seconds for one in timed if one.part.startswith("encoder."))
    rest = sum(one.seconds for one in timed) - update - head - encoder
    share = 1.0
    if work.mode is Mode.TRAIN:
        behind = min(whole, _launching(config, work, calibration, part="_gradients"))
        ahead = min(behind, _launching(config, work, calibration, part="_forward"))
        launch, share = f"{launch}_forward", FORWARD_SHARE
    first = 0.0
    if isinstance(config, Seq2SeqConfig | RNNConfig) and work.mode is not Mode.DECODE:
        first = min(ahead, config.n_encoder_layers * calibration.launch(launch).layer)
    forward = [(first, share * encoder), (ahead - first, share * rest), (0.0, head)]
    return [*forward, (behind - ahead, (1 - share) * (encoder + rest)), (whole - behind, update)]


def _overlapped(phases: list[tuple[float, float]]) -> float:
    """A device that computes while the CPU launches ahead: when the last kernel of (launch, compute) phases ends."""
    cpu = device = 0.0
    for launch, compute in phases:
        device = max(device + compute, cpu + max(launch, compute))
        cpu += launch
    return device


class _Meter:
    """From operations to seconds by the calibration's tables."""

    def __init__(self, config: ModelConfig, work: Workload, calibration: Calibration) -> None:
        self.config = config
        self.work = work
        self.calibration = calibration
        self.road = "train" if work.mode is Mode.TRAIN else "infer"
        weights = parameters(config).total
        held = 0 if work.mode is not Mode.DECODE else cache_bytes(
            config, batch=work.batch, length=work.length, source_length=work.n_source, dtype=work.dtype
        )  # fmt: skip
        # What all fits into a cache is still there from the step before; what does not comes from farther away.
        stream, near = calibration.table("stream"), NEAR[calibration.kind]
        self.streaming = stream.at(weights * work.dtype.narrow + held)
        self.farther = max(0.0, self.streaming - stream.at(near))

    def spent(self) -> Iterator[Spent]:
        for one in operations(self.config, self.work):
            seconds, name = self._one(one)
            if self.work.checkpointing and one.is_block:
                seconds *= 1 + FORWARD_SHARE
            if seconds:
                yield Spent(part=one.part, name=name, runs=one.runs, seconds=seconds)
        if self.work.mode is Mode.TRAIN:
            n = parameters(self.config).total
            yield Spent(part="optimizer", name="update", runs=1, seconds=self._kernel("update", n))

    def _one(self, one: Operation) -> tuple[float, str]:
        if one.is_attention_core:
            # Scores stand for the three; softmax and mix are within that table.
            return (one.copies * self._attention(one), "attention") if one.name == "scores" else (0.0, one.name)
        if one.name in ("input", "recurrent", "gates"):
            return (one.copies * self._recurrence(one), "recurrence") if one.name == "recurrent" else (0.0, one.name)
        if one.part == LOSS:
            return self._kernel("loss", one.reads), one.name
        if one.product is not None:
            return one.runs * self._product(one), one.name
        return one.runs * self._elementwise(one), one.name

    def _kernel(self, name: str, *sizes: int | float) -> float:
        """On a CPU without what a call costs by itself: launching has that."""
        table = self.calibration.table(f"{name}.{self.road}")
        return table.at(*sizes) if self.calibration.is_asynchronous else max(0.0, table.at(*sizes) - table.floor)

    def _product(self, one: Operation) -> float:
        assert one.product is not None
        product = one.product
        seconds = self._kernel("product", product.groups * product.rows, product.inner, product.columns)
        if product.columns % ODD and product.columns > ODD:
            rows, shared = product.groups * product.rows, math.gcd(product.columns, ODD)
            seconds *= self.calibration.table(f"odd.{self.road}").at(rows, shared)
        if self.road == "train":
            if one.elementwise:
                seconds += self._kernel("bias", product.rows * product.columns)
            if self.work.dtype is Precision.MIXED and one.name not in NARROW:
                seconds += self._kernel("cast", product.rows * product.inner)
        else:
            moved = one.weights * self.work.dtype.narrow
            seconds = max(seconds + moved * self.farther, moved * self.streaming)
        return seconds

    def _attention(self, one: Operation) -> float:
        assert one.product is not None
        assert isinstance(self.config, TransformerConfig)
        product, config = one.product, self.config
        width = (config.d_head + config.d_value) / 2
        if product.rows == 1 and self.work.mode is Mode.DECODE:
            # A GPU's fused kernel reads keys and values once for all the heads that share them.
            is_shared = self.calibration.is_asynchronous and self.work.kernel is Kernel.FUSED
            groups = self.work.batch * config.n_kv_heads if is_shared else product.groups
            seconds = self._kernel(f"step-{self.work.kernel.value}", groups, product.columns, width)
            # The values' share is the mix's; they are about as many as the keys.
            return seconds + 2 * one.cache * self.work.dtype.narrow * self.farther
        is_causal = one.visible < 1 and self.work.kernel is Kernel.FUSED
        name = f"{'causal' if is_causal else 'full'}-{self.work.kernel.value}"
        return self._looking(name, product.groups, (product.rows * product.columns) ** 0.5, width)

    def _looking(self, name: str, groups: int, n: float, width: float) -> float:
        """Beyond the longest text timed by work, and by how busy the device is.

        A text r times as long is shared out as r of the longest are, so the device is as busy as with these; to go on
        by n² alone would keep a half-idle device half idle. Each query then takes longer by the keys that it sees:
        along the line through its time at the last two lengths, of as many texts as were timed.
        """
        table = self.calibration.table(f"{name}.{self.road}")
        groups_timed, lengths, _ = table.axes
        most, (*_, before, longest) = groups_timed[-1], (lengths[0] / 2, *lengths)
        longer = max(1.0, n / longest)
        rise = 1 - table.at(most, before, width) / before * longest / table.at(most, longest, width)
        # Never by less than half of the line that all keys would give: two timings are no sure slope.
        growing = min(1.0, max(0.5, rise / (1 - before / longest)))
        return (1 + growing * (longer - 1)) * self._kernel(name, longer * groups, n / longer, width)

    def _recurrence(self, one: Operation) -> float:
        """A whole layer in one direction; two directions are timed together, each half."""
        assert one.product is not None
        assert isinstance(self.config, RNNConfig)
        is_encoder = one.part.startswith("encoder")
        table = self.calibration.table(f"{'two-way' if is_encoder else 'one-way'}.{self.road}")
        # Launching was measured on a few steps of a small one and holds these already.
        seconds = max(0.0, table.at(one.steps, one.product.rows, one.product.inner) - table.floor)
        seconds /= 2 if is_encoder else 1
        return seconds * (self.calibration.table(f"lstm.{self.road}").at(1) if self.config.cell is CellKind.LSTM else 1)

    def _elementwise(self, one: Operation) -> float:
        match one.name:
            case "norm":
                assert isinstance(self.config, TransformerConfig)
                return self._kernel(self.config.norm.value, one.writes)
            case "activation":
                assert isinstance(self.config, TransformerConfig)
                gate = self._kernel("gate", one.writes) if one.reads > one.writes else 0.0
                return self._kernel(self.config.activation.value, one.writes) + gate
            case "look-up":
                # Its gradient is as large as the table.
                gradient = self._kernel("fill", one.parameters) if self.road == "train" and one.parameters else 0.0
                return self._kernel("look-up", one.writes) + gradient
            case "softmax":
                return self._kernel("softmax", one.writes)
            case "rotation":
                return self._kernel("rotation", one.writes)
            case _:
                return self._kernel("add", one.writes) if one.writes else 0.0
