"""Lecture E's two tables, row by row: its O(·) beside the exact numbers of this model.

E writes m for the number of heads; here that is h, and m is the length of a source.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qkv.choices import Activation, Kernel
from qkv.config import ModelConfig, RNNConfig, TransformerConfig
from qkv.cost.estimate import Estimate, row_of
from qkv.cost.operation import Operation, Phase
from qkv.cost.workload import Mode

SLIPS = (
    "E counts the IO of a matrix product as nm + mk + nm; the result has n×k numbers, so it is nm + mk + nk.",
    "E's IO of the FFN, 2bnd + 8d², leaves out the hidden activations: bn·d_ff numbers, written and read twice.",
)
ENCODER_DECODER_SLIP = (
    "E's answer for an encoder–decoder names n² the encoder's and m² the decoder's; n is the target's length, so m² is "
    "the encoder's."
)
TOTALS = {False: ("bnd² + bn²d", "bnd + bhn² + d²"), True: ("bd² + bnd", "bhn + bnd + d²")}
"""E's sums, of a whole sequence and of a decoding step: operations, IO."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line: E's orders, and what is exact, in all layers."""

    name: str
    order: str
    """E's O(·) of the operations; empty where the lecture has none."""
    io_order: str
    flops: int
    elementwise: int
    numbers: int
    """Read and written by operations that are not fused."""
    n_bytes: int
    kernel_bytes: int
    """Read and written by this workload's kernel: fused attention never writes its scores."""
    parameters: int

    @property
    def intensity(self) -> float:
        return self.flops / self.n_bytes if self.n_bytes else 0.0

    @property
    def kernel_intensity(self) -> float:
        return self.flops / self.kernel_bytes if self.kernel_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "operation": self.name, "order": self.order, "io_order": self.io_order, "flops": self.flops,
            "elementwise_flops": self.elementwise, "numbers_moved": self.numbers, "bytes_moved": self.n_bytes,
            "flops_a_byte": self.intensity, "kernel_bytes_moved": self.kernel_bytes,
            "kernel_flops_a_byte": self.kernel_intensity, "parameters": self.parameters,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LectureTable:
    """One pass's rows; a generation has two."""

    title: str
    rows: tuple[Row, ...]
    total: Row


_ACTIVATIONS = {
    Activation.RELU: "ReLU", Activation.GELU: "GELU", Activation.GELU_TANH: "GELU", Activation.SILU: "SiLU",
}  # fmt: skip
_SELF = (
    ("xW_Q, xW_K, xW_V", "attention", ("query", "key", "value", "rotation"), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
    ("softmax(QKᵀ/√d)", "attention", ("scores", "softmax"), "bn²d", "2bnd + bhn²", "bnd", "bhn + bnd + bd"),
    ("P·V", "attention", ("mix",), "bn²d", "2bnd + bhn²", "bnd", "bhn + bnd + bd"),
    ("concat(heads)·W_O", "attention", ("output", "pool"), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
    ("f(YW₁)W₂", "feedforward", ("expand", "gate", "activation", "contract"), "16bnd²", "2bnd + 8d²", "16bd²",
     "2bd + 8d²"),
)  # fmt: skip
_CROSS = (
    ("cross: queries, keys, values", "cross", ("query", "key", "value"), "bnd² + bmd²", "bnd + bmd + d²", "bd²",
     "2bd + d²"),
    ("cross: softmax(QKᵀ/√d)", "cross", ("scores", "softmax"), "bnmd", "bnd + bmd + bhnm", "bmd", "bhm + bmd + bd"),
    ("cross: P·V", "cross", ("mix",), "bnmd", "bnd + bmd + bhnm", "bmd", "bhm + bmd + bd"),
    ("cross: ·W_O", "cross", ("output", "pool"), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
)  # fmt: skip
_RECURRENT = (
    ("xW, all steps at once", "recurrence", ("input",), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
    ("hU and gates, step by step", "recurrence", ("recurrent", "gates"), "bnd²", "bnd + nd²", "bd²", "2bd + d²"),
)


def lecture_tables(estimate: Estimate) -> list[LectureTable]:
    """The forward pass; of a generation, the prompt's pass and all decoding steps."""
    is_generation = estimate.work.mode is Mode.GENERATE
    phases = (Phase.PREFILL, Phase.DECODE) if is_generation else (None,)
    tables = []
    for phase in phases:
        made = [one for one in estimate.operations if phase is None or one.phase is phase]
        if made:
            tables.append(_table(estimate, made, phase))
    return tables


def slips(config: ModelConfig) -> list[str]:
    """What the slides get wrong about these rows."""
    if isinstance(config, RNNConfig):
        return []
    return [*SLIPS, ENCODER_DECODER_SLIP] if config.family == "seq2seq" else list(SLIPS)


def attention_weights(config: TransformerConfig, n_layers: int) -> int:
    """Of W_Q, W_K, W_V, W_O in that many layers, biases left out: 4·L·d² where all heads are split. C lacks the 4."""
    d, queries = config.d_model, config.n_heads * config.d_head
    kv = config.n_kv_heads * (config.d_head + config.d_value)
    joined = config.n_heads * config.d_value if config.head_layout.value == "split" else config.d_value
    return n_layers * d * (queries + kv + (joined if config.output_projection else 0))


def _table(estimate: Estimate, made: list[Operation], phase: Phase | None) -> LectureTable:
    is_step = phase is Phase.DECODE or estimate.work.mode is Mode.DECODE
    title = {Phase.PREFILL: "the prompt", Phase.DECODE: "all decoding steps"}.get(phase, "") if phase else ""
    rows: list[Row] = []
    taken: set[int] = set()
    for stack in ("", "encoder.", "decoder."):
        for name, part, names, *orders in (*_SELF, *_CROSS, *_RECURRENT):
            where = f"{stack}recurrence" if part == "recurrence" else f"{stack}blocks.{part}"
            own = [one for one in made if one.part == where and one.name in names]
            if own:
                order, io_order = orders[2:] if is_step else orders[:2]
                if stack == "encoder.":
                    order, io_order = order.replace("n", "m"), io_order.replace("n", "m")
                said = f"{stack.removesuffix('.')}: {name}" if stack else name
                said = said.replace("f(", f"{_activation(estimate.config)}(")
                rows.append(_row(estimate, said, own, order=order, io_order=io_order))
                taken |= {id(one) for one in own}
    rest = [one for one in made if id(one) not in taken]
    core = [one for one in made if id(one) in taken]
    order, io_order = ("", "") if isinstance(estimate.config, RNNConfig) else TOTALS[is_step]
    rows.append(_row(estimate, "all of these", core, order=order, io_order=io_order))
    rows += _others(estimate, rest)
    total = _row(estimate, "the whole pass", made, order="", io_order="")
    return LectureTable(title=title, rows=tuple(rows), total=total)


def _activation(config: ModelConfig) -> str:
    return "f" if isinstance(config, RNNConfig) else _ACTIVATIONS[config.activation]


def _others(estimate: Estimate, rest: list[Operation]) -> list[Row]:
    """What the lecture leaves out."""
    groups: dict[str, list[Operation]] = {}
    for one in rest:
        is_small = one.name in ("norm", "add", "sum") and one.part != "loss"
        name = "norms and adds" if is_small else f"{one.part}: {one.name}" if one.name != "logits" else "logits xW_Eᵀ"
        if one.name == "look-up":
            name = "look-ups"
        groups.setdefault(name, []).append(one)
    return [_row(estimate, name, own, order="", io_order="") for name, own in groups.items()]


def _row(estimate: Estimate, name: str, own: Iterable[Operation], *, order: str, io_order: str) -> Row:
    own = list(own)
    numbers = sum(one.moved(fused=False) for one in own)
    moved = "bytes_fused" if estimate.work.kernel is Kernel.FUSED else "bytes_unfused"
    return Row(
        name=name,
        order=order,
        io_order=io_order,
        flops=sum(one.flops for one in own),
        elementwise=sum(one.elementwise_flops for one in own),
        numbers=numbers,
        n_bytes=numbers * estimate.work.dtype.narrow,
        kernel_bytes=sum(row_of(one, estimate.work)[moved] for one in own),
        parameters=sum(one.n_parameters for one in own),
    )
