"""List the kernels that a step launches, with the FLOPs and bytes of each kernel."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from qkv.choices import AttentionKernel
from qkv.cost.operation import MatMul, Operation, Phase
from qkv.cost.workload import Mode, Precision, Workload


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """A kernel, or a few kernels launched together.

    Sizes refer to one run, whereas `flops` and `n_bytes` are totals over all `runs`.
    """

    part: str
    name: str
    phase: Phase
    runs: int
    """Number of runs: layers × steps."""
    kernels: int = 1
    """Approximate number of kernels that eager torch launches per run."""
    matmuls: tuple[MatMul, ...] = ()
    unmasked_fraction: Fraction = Fraction(1)
    """Fraction of the matmul work that is not masked."""
    skipped_macs: int = 0
    """Multiply–adds over all runs that are not computed because they belong to the gradients of an RNN's zero initial
    state."""
    elementwise: int = 0
    bytes_read: int
    bytes_written: int

    @property
    def n_kernels(self) -> int:
        """Number of kernels launched in all runs."""
        return self.kernels * self.runs

    @property
    def flops(self) -> int:
        return 2 * (sum(matmul.macs for matmul in self.matmuls) * self.runs - self.skipped_macs)

    @property
    def useful_flops(self) -> int:
        return int(self.flops * self.unmasked_fraction)

    @property
    def elementwise_flops(self) -> int:
        return self.elementwise * self.runs

    @property
    def n_bytes(self) -> int:
        return (self.bytes_read + self.bytes_written) * self.runs

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte, including element-wise operations."""
        return (self.flops + self.elementwise_flops) / self.n_bytes if self.n_bytes else 0.0

    def bound_by(self, *, peak: float, bandwidth: float) -> str:
        """Return the limiting resource, `compute` or `memory`, for the given peak (FLOP/s) and bandwidth (bytes/s)."""
        return "compute" if self.flops * bandwidth > self.n_bytes * peak else "memory"

    def as_dict(self) -> dict[str, Any]:
        """Return the totals over all runs as a flat dict."""
        return {
            "part": self.part,
            "operation": self.name,
            "phase": self.phase.value,
            "runs": self.runs,
            "kernels": self.n_kernels,
            "flops": self.flops,
            "useful_flops": self.useful_flops,
            "elementwise_flops": self.elementwise_flops,
            "bytes_read": self.bytes_read * self.runs,
            "bytes_written": self.bytes_written * self.runs,
            "intensity": self.intensity,
        }


def list_kernel_launches(operations: Iterable[Operation], workload: Workload) -> list[KernelLaunch]:
    """List the kernels of a step, ordered by phase.

    Fused attention counts as one launch that computes the scores, softmax and mix.
    """
    is_fused = workload.kernel is AttentionKernel.FUSED
    forward: list[KernelLaunch] = []
    backward: list[KernelLaunch] = []
    recomputed: list[KernelLaunch] = []
    for is_core, group in groupby(operations, key=lambda op: is_fused and op.is_attention_core):
        forward_launches = (
            _fused_attention_forward_launches if is_core else _single_operation_forward_launches_with_cast
        )
        backward_launches = _fused_attention_backward_launches if is_core else _single_operation_backward_launches
        for ops in _split_attention_cores(list(group)) if is_core else ([op] for op in group):
            forward += forward_launches(ops, workload.dtype)
            if workload.mode is Mode.TRAIN:
                backward += backward_launches(ops, workload.dtype)
                if workload.activation_checkpointing and ops[0].is_block:
                    recomputed += forward_launches(ops, workload.dtype, Phase.RECOMPUTE)
    return [*forward, *recomputed, *reversed(backward)]


def _split_attention_cores(operations: list[Operation]) -> list[list[Operation]]:
    """Split a list of consecutive attention operations into groups of scores, softmax and mix."""
    return [operations[i : i + 3] for i in range(0, len(operations), 3)]


def _single_operation_forward_launches_with_cast(
    operations: list[Operation], dtype: Precision, phase: Phase | None = None
) -> list[KernelLaunch]:
    """List the forward kernels of a single operation.

    Under autocast, the cast of the weight comes first.
    """
    (op,) = operations
    bytes_read, bytes_written = op.forward_bytes(dtype, fused=False)
    launch = KernelLaunch(
        part=op.part,
        name=op.name,
        phase=phase or op.phase,
        runs=op.runs,
        kernels=op.kernels,
        matmuls=() if op.matmul is None else (op.matmul,),
        unmasked_fraction=op.unmasked_fraction,
        elementwise=op.elementwise,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
    )
    cast_read, cast_written = op.weight_cast_bytes_moved(dtype)
    if not cast_written:
        return [launch]
    # Autocast caches the 16-bit weight, so the cast runs once per pass.
    cast = replace(
        launch,
        name=f"cast {op.name}",
        runs=op.copies,
        kernels=1,
        matmuls=(),
        elementwise=0,
        bytes_read=cast_read,
        bytes_written=cast_written,
    )
    return [cast, launch]


def _fused_attention_forward_launches(
    operations: list[Operation], dtype: Precision, phase: Phase | None = None
) -> list[KernelLaunch]:
    """Combine the scores, softmax and mix into one launch of the fused attention kernel."""
    first = operations[0]
    n_bytes = [op.forward_bytes(dtype, fused=True) for op in operations]
    launch = KernelLaunch(
        part=first.part,
        name="attention",
        phase=phase or first.phase,
        runs=first.runs,
        kernels=min(op.kernels for op in operations),
        matmuls=tuple(op.matmul for op in operations if op.matmul is not None),
        unmasked_fraction=first.unmasked_fraction,
        elementwise=sum(op.elementwise for op in operations),
        bytes_read=sum(read for read, _ in n_bytes),
        bytes_written=sum(written for _, written in n_bytes),
    )
    return [launch]


def _single_operation_backward_launches(operations: list[Operation], dtype: Precision) -> list[KernelLaunch]:
    """List the backward kernels of a single operation.

    The backward pass of a matmul computes two gradients.
    """
    (op,) = operations
    bytes_read, bytes_written = op.backward_bytes(dtype, fused=False)
    launch = KernelLaunch(
        part=op.part,
        name=op.name,
        phase=Phase.BACKWARD,
        runs=op.runs,
        # Two matmuls, plus a sum for the gradient of a bias.
        kernels=op.kernels * (1 if op.matmul is None else 2 + (op.elementwise > 0)),
        matmuls=() if op.matmul is None else op.matmul.gradients,
        unmasked_fraction=op.unmasked_fraction,
        skipped_macs=op.skipped_gradient_macs * op.copies,
        elementwise=op.elementwise * 2,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
    )
    return [launch]


def _fused_attention_backward_launches(operations: list[Operation], dtype: Precision) -> list[KernelLaunch]:
    """Build the backward launch of fused attention, which recomputes QKᵀ.

    The kernel reads Q, K, V, the output and its gradient, and writes three gradients.
    """
    (forward,) = _fused_attention_forward_launches(operations, dtype)
    scores, mix = forward.matmuls
    n_bytes = [op.backward_bytes(dtype, fused=True) for op in operations]
    launch = KernelLaunch(
        part=forward.part,
        name="attention",
        phase=Phase.BACKWARD,
        runs=forward.runs,
        kernels=3,  # row sums of gradient · output, the main kernel, the cast of dQ
        matmuls=(scores, *scores.gradients, *mix.gradients),
        unmasked_fraction=forward.unmasked_fraction,
        elementwise=forward.elementwise * 2,
        bytes_read=sum(read for read, _ in n_bytes),
        bytes_written=sum(written for _, written in n_bytes),
    )
    return [launch]
