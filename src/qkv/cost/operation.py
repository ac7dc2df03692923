"""Cost of a single operation: matmuls, element-wise work, memory traffic and tensors saved for the backward pass.

The parameters and FLOPs of a model are the sums over its operations.
"""

from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from qkv.choices import AttentionKernel
from qkv.cost.workload import Mode, Precision, Workload


class Phase(StrEnum):
    """The phase of a step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward work that activation checkpointing repeats."""
    UPDATE = "update"
    PREFILL = "prefill"
    DECODE = "decode"
    """All decode steps of a generation combined."""


class BytesMoved(NamedTuple):
    read: int
    written: int


@dataclass(frozen=True, kw_only=True)
class MatMul:
    """A batched matrix product of shape (batch, rows, inner) · (batch, inner, columns)."""

    batch: int = 1
    rows: int
    inner: int
    columns: int

    @property
    def macs(self) -> int:
        """Number of multiply–adds."""
        return self.batch * self.rows * self.inner * self.columns

    @property
    def gradients(self) -> "tuple[MatMul, MatMul]":
        """The two matmuls of the backward pass, which compute the gradients of the left and right factors."""
        return (
            MatMul(batch=self.batch, rows=self.rows, inner=self.columns, columns=self.inner),
            MatMul(batch=self.batch, rows=self.inner, inner=self.rows, columns=self.columns),
        )


@dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """The elements and bytes that an operation keeps in memory, for example for the backward pass."""

    elements: int = 0
    """Number of elements in the precision of matmuls."""
    fp32_elements: int = 0
    """Number of elements that autocast keeps in float32: residual stream and norm statistics."""
    elements_without_autocast: int = 0
    """Number of elements kept only without autocast. Autocast keeps the 16-bit copies made for matmuls instead."""
    autocast_elements: int = 0
    """Number of elements in the 16-bit copies made by autocast. Each matmul that reads a float32 tensor makes one
    copy."""
    raw_bytes: int = 0
    """Number of bytes that do not depend on the precision: masks, indices and log-probabilities."""

    def __add__(self, other: "SavedTensors") -> "SavedTensors":
        return SavedTensors(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    def __mul__(self, times: int) -> "SavedTensors":
        return SavedTensors(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    def n_bytes(self, dtype: Precision) -> int:
        """Return the number of bytes in the given precision."""
        n = self.elements * dtype.matmul_itemsize + self.fp32_elements * dtype.param_itemsize + self.raw_bytes
        if dtype is Precision.MIXED:
            return n + self.autocast_elements * dtype.matmul_itemsize
        return n + self.elements_without_autocast * dtype.param_itemsize


NO_SAVED_TENSORS = SavedTensors()
LOGITS = "logits"
LOSS = "loss"
SOFTMAX_OPS = 5
"""Number of element-wise operations per score: maximum, subtraction, exp, sum, division."""
LOG_SOFTMAX_OPS = 5
"""Number of element-wise operations per logit: maximum, subtraction, exp, sum, subtraction."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a model. All sizes refer to a single run, and `runs` is the number of runs.

    Memory traffic is split by kind: `weights` and `cache` are read; `reads` and `writes` count activation elements.
    `onchip_reads` and `onchip_writes` are the portions of `reads` and `writes` that stay on the chip in fused
    attention.
    """

    part: str
    """Path of the module without layer indices, such as `decoder.blocks.cross_attention`."""
    name: str
    copies: int = 1
    """Number of layers (times the number of directions in an RNN), each with separate weights."""
    steps: int = 1
    """Number of sequential runs that share the weights. Only recurrences have more than one."""
    matmul: MatMul | None = None
    unmasked_fraction: Fraction = Fraction(1)
    """Fraction of the matmul that is not masked. An unmasked kernel also computes the masked part."""
    skipped_gradient_macs: int = 0
    """Number of multiply–adds for gradients that are not needed: those of an RNN's zero initial state or of input
    patches."""
    elementwise: int = 0
    parameters: int = 0
    """Number of parameters in one copy."""
    weights: int = 0
    cache: int = 0
    reads: int = 0
    writes: int = 0
    onchip_reads: int = 0
    onchip_writes: int = 0
    autocast_fp32: bool = False
    """True if the operation runs in float32 under autocast. This applies to the residual stream, norms, loss and
    recurrences."""
    kernels: int = 1
    """Approximate number of kernels that eager torch launches per run."""
    phase: Phase = Phase.FORWARD
    saved: SavedTensors = NO_SAVED_TENSORS

    @property
    def runs(self) -> int:
        return self.copies * self.steps

    @property
    def flops(self) -> int:
        """Matmul FLOPs of the forward pass, including masked pairs."""
        return 0 if self.matmul is None else 2 * self.matmul.macs * self.runs

    @property
    def useful_flops(self) -> int:
        return int(self.flops * self.unmasked_fraction)

    @property
    def backward_flops(self) -> int:
        """Matmul FLOPs of the backward pass: two matmuls for each matmul in the forward pass."""
        return 2 * self.flops - 2 * self.skipped_gradient_macs * self.copies

    @property
    def useful_backward_flops(self) -> int:
        return int(self.backward_flops * self.unmasked_fraction)

    @property
    def elementwise_flops(self) -> int:
        return self.elementwise * self.runs

    @property
    def n_parameters(self) -> int:
        """Total number of parameters in all copies."""
        return self.parameters * self.copies

    def elements_moved(self, *, fused: bool) -> int:
        """Return the number of elements read and written in all runs."""
        onchip = self.onchip_reads + self.onchip_writes if fused else 0
        return (self.weights + self.cache + self.reads + self.writes - onchip) * self.runs

    def forward_bytes(self, dtype: Precision, *, fused: bool) -> BytesMoved:
        """Return the bytes read and the bytes written by one run of the forward pass."""
        reads, writes = self._activation_elements_read_written(fused=fused)
        itemsize = dtype.param_itemsize if self.autocast_fp32 else dtype.matmul_itemsize
        weight_itemsize = dtype.param_itemsize if self.matmul is None else itemsize
        return BytesMoved(
            read=self.weights * weight_itemsize + (self.cache + reads) * itemsize, written=writes * itemsize
        )

    def backward_bytes(self, dtype: Precision, *, fused: bool) -> BytesMoved:
        """Return the bytes read and the bytes written by one run of the backward pass.

        The backward pass reads the inputs and the output gradient (twice for a matmul), and writes the gradients of the
        inputs and weights. The fused kernel also reads its output, which is needed for the gradient of softmax.
        """
        reads, writes = self._activation_elements_read_written(fused=fused)
        itemsize = dtype.param_itemsize if self.autocast_fp32 else dtype.matmul_itemsize
        weight_itemsize = 0 if self.matmul is None else itemsize
        times = 1 if self.matmul is None else 2
        return BytesMoved(
            read=self.weights * weight_itemsize + (reads + times * writes) * itemsize,
            written=reads * itemsize + self.parameters * dtype.param_itemsize,
        )

    def weight_cast_bytes_moved(self, dtype: Precision) -> BytesMoved:
        """Return the bytes read and written when autocast casts the weight of one copy to 16 bits, once per pass."""
        if dtype is not Precision.MIXED or self.matmul is None or self.autocast_fp32:
            return BytesMoved(read=0, written=0)
        return BytesMoved(read=self.weights * dtype.param_itemsize, written=self.weights * dtype.matmul_itemsize)

    def _activation_elements_read_written(self, *, fused: bool) -> tuple[int, int]:
        """Return the activation elements read and written.

        If `fused` is True, elements that stay on the chip are excluded.
        """
        if not fused:
            return self.reads, self.writes
        return self.reads - self.onchip_reads, self.writes - self.onchip_writes

    @property
    def is_block(self) -> bool:
        """True if the operation belongs to a Transformer block, which activation checkpointing recomputes."""
        return "blocks" in self.part.split(".")

    @property
    def is_attention_core(self) -> bool:
        """True if the operation is the scores, softmax or mix, which a fused kernel computes together."""
        return self.onchip_reads + self.onchip_writes > 0


def linear_operation(
    part: str,
    name: str,
    *,
    rows: int,
    d_in: int,
    d_out: int,
    bias: bool,
    copies: int = 1,
    saved: SavedTensors = NO_SAVED_TENSORS,
) -> Operation:
    """Build the operation for a linear layer applied to `rows` vectors."""
    return Operation(
        part=part,
        name=name,
        copies=copies,
        matmul=MatMul(rows=rows, inner=d_in, columns=d_out),
        elementwise=rows * d_out if bias else 0,
        parameters=d_in * d_out + (d_out if bias else 0),
        weights=d_in * d_out + (d_out if bias else 0),
        reads=rows * d_in,
        writes=rows * d_out,
        saved=saved,
    )


def lookup_operation(
    part: str, *, rows: int, n_entries: int, width: int, parameters: int | None = None, add: bool = False
) -> Operation:
    """Build the operation for an embedding lookup with one entry per row.

    If `add` is True, the entries are added to an existing tensor. A lookup has no matmul FLOPs.
    """
    return Operation(
        part=part,
        name="lookup",
        elementwise=rows * width if add else 0,
        parameters=n_entries * width if parameters is None else parameters,
        weights=rows * width,
        reads=rows * width if add else 0,
        writes=rows * width,
        autocast_fp32=True,
        kernels=2,  # the lookup, then an addition or a scaling
    )


def logits_operation(part: str, *, rows: int, d_model: int, vocab_size: int, is_tied: bool, bias: bool) -> Operation:
    """Build the operation for the projection to the logits.

    A tied weight is counted with the token embedding.
    """
    n_bias = vocab_size if bias else 0
    return Operation(
        part=part,
        name=LOGITS,
        matmul=MatMul(rows=rows, inner=d_model, columns=vocab_size),
        elementwise=rows * n_bias,
        parameters=n_bias + (0 if is_tied else vocab_size * d_model),
        weights=vocab_size * d_model + n_bias,
        reads=rows * d_model,
        writes=rows * vocab_size,
        saved=SavedTensors(autocast_elements=rows * d_model),
    )


def loss_operation(logits: Operation) -> Operation:
    """Build the operation for the cross-entropy of the logits.

    The loss is always computed in float32, and the log-probabilities are saved.
    """
    return Operation(
        part=LOSS,
        name=logits.part,
        elementwise=LOG_SOFTMAX_OPS * logits.writes,
        reads=logits.writes,
        writes=logits.writes,
        autocast_fp32=True,
        kernels=3,  # cast to float32, log-softmax, sum over the targets
        saved=SavedTensors(raw_bytes=4 * logits.writes),
    )


def sum_decode_steps(first: Operation, last: Operation, n: int) -> Operation:
    """Combine `n` decode steps into one operation.

    The result is exact because every size grows linearly from the first step to the last.
    """
    if first == last:
        return replace(first, steps=first.steps * n, phase=Phase.DECODE)

    def linear_sum(first_size: int, last_size: int) -> int:
        return n * (first_size + last_size) // 2

    names = ("elementwise", "weights", "cache", "reads", "writes", "onchip_reads", "onchip_writes")
    sums = {name: linear_sum(getattr(first, name), getattr(last, name)) for name in names}
    matmul, unmasked_fraction = None, Fraction(1)
    if first.matmul is not None and last.matmul is not None:
        # Only one dimension of the matmul, the number of keys, changes between steps.
        dims = {name: (getattr(first.matmul, name), getattr(last.matmul, name)) for name in ("inner", "columns")}
        summed = {name: pair[0] if pair[0] == pair[1] else linear_sum(*pair) for name, pair in dims.items()}
        matmul = replace(first.matmul, **summed)
        useful = n * sum(op.unmasked_fraction * op.matmul.macs for op in (first, last) if op.matmul) / 2
        unmasked_fraction = Fraction(useful) / matmul.macs
    return replace(
        first,
        **sums,
        matmul=matmul,
        unmasked_fraction=unmasked_fraction,
        kernels=first.kernels * n,
        phase=Phase.DECODE,
    )


@dataclass(frozen=True)
class ParameterCounts:
    """The number of parameters in each part of a model.

    Parts are named like the modules of the model, without layer indices.
    """

    by_part: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_part.values())

    def count_matching(self, name: str) -> int:
        """Count the parameters of all parts whose path contains this name, such as `attention` or `decoder`."""
        return sum(count for part, count in self.by_part.items() if name in part.split("."))

    def as_dict(self) -> dict[str, int]:
        return {**self.by_part, "total": self.total}


def group_parameters_by_part(operations: list[Operation]) -> ParameterCounts:
    """Sum the parameters of all operations in each part of the model."""
    by_part: dict[str, int] = {}
    for op in operations:
        if op.parameters:
            by_part[op.part] = by_part.get(op.part, 0) + op.n_parameters
    return ParameterCounts(by_part)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """The matmul FLOPs of a step. Each multiply–add counts as 2 FLOPs.

    The `useful` counts exclude masked query–key pairs, which an unmasked kernel also computes.
    """

    forward: int
    useful_forward: int
    backward: int = 0
    useful_backward: int = 0
    recomputed: int = 0
    """Forward FLOPs that are repeated in the backward pass: QKᵀ in the fused kernel, and checkpointed blocks."""
    decode: int = 0
    """The portion of `forward` that comes from the decode steps of a generation."""
    elementwise: int = 0
    """Element-wise operations in the forward pass: softmax, norms, activations, biases and additions."""

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed

    @property
    def useful(self) -> int:
        return self.useful_forward + self.useful_backward

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total, "useful": self.useful}


def sum_flops(operations: list[Operation], workload: Workload) -> Flops:
    """Sum the FLOPs of all operations in a step."""
    is_training = workload.mode is Mode.TRAIN
    return Flops(
        forward=sum(op.flops for op in operations),
        useful_forward=sum(op.useful_flops for op in operations),
        backward=sum(op.backward_flops for op in operations) if is_training else 0,
        useful_backward=sum(op.useful_backward_flops for op in operations) if is_training else 0,
        recomputed=sum(flops_recomputed_in_backward(op, workload) for op in operations) if is_training else 0,
        decode=sum(op.flops for op in operations if op.phase is Phase.DECODE),
        elementwise=sum(op.elementwise_flops for op in operations),
    )


def flops_recomputed_in_backward(op: Operation, workload: Workload) -> int:
    """Return the forward FLOPs of an operation that are repeated in the backward pass."""
    flops = 0
    if workload.activation_checkpointing and op.is_block:
        flops += op.flops
    # The fused attention kernel does not save the scores, so its backward pass recomputes them.
    if workload.kernel is AttentionKernel.FUSED and op.is_attention_core and op.name == "scores":
        flops += op.flops
    return flops
