"""Build the two cost tables of lecture E, with its O(·) terms next to exact numbers for a model.

In the lecture, m is the number of heads. In this module, h is the number of heads and m is the length of the source.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qkv.choices import Activation, AttentionKernel
from qkv.config import ModelConfig, RNNConfig, TransformerConfig
from qkv.cost.estimate import Estimate, operation_row
from qkv.cost.operation import Operation, Phase
from qkv.cost.workload import Mode

LECTURE_ERRATA = (
    "Lecture E counts the IO of a matrix product as nm + mk + nm. The correct IO is nm + mk + nk.",
    "Lecture E omits the hidden activations (bn·d_ff elements, written and read twice) from the IO of the FFN.",
)
ENCODER_DECODER_ERRATUM = (
    "For an encoder–decoder, lecture E assigns n² to the encoder and m² to the decoder. Because n is the length of the "
    "target, m² belongs to the encoder."
)
TOTALS = {False: ("bnd² + bn²d", "bnd + bhn² + d²"), True: ("bd² + bnd", "bhn + bnd + d²")}
"""Totals of operations and IO in lecture E, for a full sequence (False) and for a decode step (True)."""


@dataclass(frozen=True, kw_only=True)
class LectureRow:
    """A row of a cost table, with the O(·) terms of lecture E and the exact numbers summed over all layers."""

    name: str
    order: str
    """Complexity of the operations in O(·) notation, or an empty string if the lecture has no such row."""
    io_order: str
    """Complexity of the IO in O(·) notation, or an empty string if the lecture has no such row."""
    flops: int
    elementwise: int
    unfused_elements: int
    """Number of elements read and written without kernel fusion."""
    unfused_bytes: int
    kernel_bytes: int
    """Number of bytes read and written by the workload's attention kernel. Fused attention never writes the scores."""
    parameters: int

    @property
    def intensity(self) -> float:
        return self.flops / self.unfused_bytes if self.unfused_bytes else 0.0

    @property
    def kernel_intensity(self) -> float:
        return self.flops / self.kernel_bytes if self.kernel_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "operation": self.name,
            "order": self.order,
            "io_order": self.io_order,
            "flops": self.flops,
            "elementwise_flops": self.elementwise,
            "elements_moved": self.unfused_elements,
            "bytes_moved": self.unfused_bytes,
            "flops_per_byte": self.intensity,
            "kernel_bytes_moved": self.kernel_bytes,
            "kernel_flops_per_byte": self.kernel_intensity,
            "parameters": self.parameters,
        }


@dataclass(frozen=True, kw_only=True)
class LectureTable:
    """A cost table for one pass. A generation has two tables: one for the prefill and one for the decode steps."""

    title: str
    rows: tuple[LectureRow, ...]
    total: LectureRow


_ACTIVATION_NAMES = {
    Activation.RELU: "ReLU",
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELU",
    Activation.SILU: "SiLU",
}
# Each row lists the name, the part, the operations, and the O(·) terms of the operations and IO, first for a full
# sequence and then for a decode step.
_SELF_ATTENTION_ROWS = (
    (
        "xW_Q, xW_K, xW_V",
        "attention",
        ("q_proj", "k_proj", "v_proj", "rotary"),
        "bnd²",
        "2bnd + d²",
        "bd²",
        "2bd + d²",
    ),
    ("softmax(QKᵀ/√d)", "attention", ("scores", "softmax"), "bn²d", "2bnd + bhn²", "bnd", "bhn + bnd + bd"),
    ("P·V", "attention", ("mix",), "bn²d", "2bnd + bhn²", "bnd", "bhn + bnd + bd"),
    ("concat(heads)·W_O", "attention", ("out_proj", "pool"), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
    (
        "f(YW₁)W₂",
        "feed_forward",
        ("up_proj", "gate_proj", "activation", "down_proj"),
        "16bnd²",
        "2bnd + 8d²",
        "16bd²",
        "2bd + 8d²",
    ),
)
_CROSS_ATTENTION_ROWS = (
    (
        "cross: queries, keys, values",
        "cross_attention",
        ("q_proj", "k_proj", "v_proj"),
        "bnd² + bmd²",
        "bnd + bmd + d²",
        "bd²",
        "2bd + d²",
    ),
    (
        "cross: softmax(QKᵀ/√d)",
        "cross_attention",
        ("scores", "softmax"),
        "bnmd",
        "bnd + bmd + bhnm",
        "bmd",
        "bhm + bmd + bd",
    ),
    ("cross: P·V", "cross_attention", ("mix",), "bnmd", "bnd + bmd + bhnm", "bmd", "bhm + bmd + bd"),
    ("cross: ·W_O", "cross_attention", ("out_proj", "pool"), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
)
_RNN_ROWS = (
    ("xW, all steps at once", "recurrence", ("input",), "bnd²", "2bnd + d²", "bd²", "2bd + d²"),
    ("hU and gates, step by step", "recurrence", ("recurrent", "gates"), "bnd²", "bnd + nd²", "bd²", "2bd + d²"),
)


def lecture_tables(estimate: Estimate) -> list[LectureTable]:
    """Build the table of the forward pass, or the tables of the prefill and decode steps of a generation."""
    is_generation = estimate.workload.mode is Mode.GENERATE
    phases = (Phase.PREFILL, Phase.DECODE) if is_generation else (None,)
    tables = []
    for phase in phases:
        operations = [op for op in estimate.operations if phase is None or op.phase is phase]
        if operations:
            tables.append(_build_table(estimate, operations, phase))
    return tables


def lecture_errata(config: ModelConfig) -> list[str]:
    """List the errors in the lecture slides that affect the rows of this model."""
    if isinstance(config, RNNConfig):
        return []
    return [*LECTURE_ERRATA, ENCODER_DECODER_ERRATUM] if config.family == "seq2seq" else list(LECTURE_ERRATA)


def count_attention_matrix_parameters(config: TransformerConfig, n_layers: int) -> int:
    """Count the parameters of W_Q, W_K, W_V and W_O without biases.

    With split heads, the count is 4·L·d². The slide in lecture C omits the factor of 4.
    """
    d, queries = config.d_model, config.n_heads * config.d_head
    keys_and_values = config.n_kv_heads * (config.d_head + config.d_value)
    joined = config.n_heads * config.d_value if config.head_combination.value == "split" else config.d_value
    return n_layers * d * (queries + keys_and_values + (joined if config.output_projection else 0))


def _build_table(estimate: Estimate, operations: list[Operation], phase: Phase | None) -> LectureTable:
    is_decode = phase is Phase.DECODE or estimate.workload.mode is Mode.DECODE
    title = {Phase.PREFILL: "prefill", Phase.DECODE: "all decode steps"}.get(phase, "") if phase else ""
    rows: list[LectureRow] = []
    in_lecture: set[int] = set()
    for stack in ("", "encoder.", "decoder."):
        for name, part, names, *orders in (*_SELF_ATTENTION_ROWS, *_CROSS_ATTENTION_ROWS, *_RNN_ROWS):
            path = f"{stack}recurrence" if part == "recurrence" else f"{stack}blocks.{part}"
            row_operations = [op for op in operations if op.part == path and op.name in names]
            if row_operations:
                order, io_order = orders[2:] if is_decode else orders[:2]
                if stack == "encoder.":
                    order, io_order = order.replace("n", "m"), io_order.replace("n", "m")
                label = f"{stack.removesuffix('.')}: {name}" if stack else name
                label = label.replace("f(", f"{_activation_name(estimate.config)}(")
                rows.append(_build_row(estimate, label, row_operations, order=order, io_order=io_order))
                in_lecture |= {id(op) for op in row_operations}
    covered = [op for op in operations if id(op) in in_lecture]
    rest = [op for op in operations if id(op) not in in_lecture]
    order, io_order = ("", "") if isinstance(estimate.config, RNNConfig) else TOTALS[is_decode]
    rows.append(_build_row(estimate, "sum of the above", covered, order=order, io_order=io_order))
    rows += _build_rows_outside_lecture(estimate, rest)
    total = _build_row(estimate, "total", operations, order="", io_order="")
    return LectureTable(title=title, rows=tuple(rows), total=total)


def _activation_name(config: ModelConfig) -> str:
    return "f" if isinstance(config, RNNConfig) else _ACTIVATION_NAMES[config.activation]


def _build_rows_outside_lecture(estimate: Estimate, operations: list[Operation]) -> list[LectureRow]:
    """Build rows for the operations that lecture E does not cover."""
    groups: dict[str, list[Operation]] = {}
    for op in operations:
        if op.name == "lookup":
            name = "lookups"
        elif op.name in ("norm", "add", "sum") and op.part != "loss":
            name = "norms and adds"
        else:
            name = "logits xW_Eᵀ" if op.name == "logits" else f"{op.part}: {op.name}"
        groups.setdefault(name, []).append(op)
    return [_build_row(estimate, name, group, order="", io_order="") for name, group in groups.items()]


def _build_row(
    estimate: Estimate, name: str, operations: Iterable[Operation], *, order: str, io_order: str
) -> LectureRow:
    operations = list(operations)
    elements = sum(op.elements_moved(fused=False) for op in operations)
    is_fused = estimate.workload.kernel is AttentionKernel.FUSED
    kernel_bytes = "bytes_fused" if is_fused else "bytes_unfused"
    return LectureRow(
        name=name,
        order=order,
        io_order=io_order,
        flops=sum(op.flops for op in operations),
        elementwise=sum(op.elementwise_flops for op in operations),
        unfused_elements=elements,
        unfused_bytes=elements * estimate.workload.dtype.matmul_itemsize,
        kernel_bytes=sum(operation_row(op, estimate.workload)[kernel_bytes] for op in operations),
        parameters=sum(op.n_parameters for op in operations),
    )
