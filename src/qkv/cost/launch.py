"""Which kernels a step starts, and what each computes and moves: all that a time is made from."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from qkv.choices import Kernel
from qkv.cost.operation import Operation, Phase, Product
from qkv.cost.workload import Mode, Precision, Workload


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kind of work on the device. Sizes are of one run; `flops` and `n_bytes` of all `runs`."""

    part: str
    name: str
    phase: Phase
    runs: int
    """Layers × steps."""
    kernels: int = 1
    """Started for one run, about: torch's eager road."""
    products: tuple[Product, ...] = ()
    visible: Fraction = Fraction(1)
    """Share of the products that a mask lets count."""
    skipped: int = 0
    """Multiply–adds, of all runs, that are left out: towards a recurrence's zero first state."""
    elementwise: int = 0
    bytes_read: int
    bytes_written: int

    @property
    def calls(self) -> int:
        """Kernels started in all."""
        return self.kernels * self.runs

    @property
    def flops(self) -> int:
        return 2 * (sum(one.multiply_adds for one in self.products) * self.runs - self.skipped)

    @property
    def useful_flops(self) -> int:
        return int(self.flops * self.visible)

    @property
    def elementwise_flops(self) -> int:
        return self.elementwise * self.runs

    @property
    def n_bytes(self) -> int:
        return (self.bytes_read + self.bytes_written) * self.runs

    @property
    def intensity(self) -> float:
        """FLOPs a byte, element-wise work among them."""
        return (self.flops + self.elementwise_flops) / self.n_bytes if self.n_bytes else 0.0

    def bound_by(self, *, peak: float, bandwidth: float) -> str:
        """What a device of that many FLOP/s and bytes/s waits for: `compute`, or `memory`."""
        return "compute" if self.flops * bandwidth > self.n_bytes * peak else "memory"

    def as_dict(self) -> dict[str, Any]:
        """All runs together, flat."""
        return {
            "part": self.part,
            "operation": self.name,
            "phase": self.phase.value,
            "runs": self.runs,
            "kernels": self.calls,
            "flops": self.flops,
            "useful_flops": self.useful_flops,
            "elementwise_flops": self.elementwise_flops,
            "bytes_read": self.bytes_read * self.runs,
            "bytes_written": self.bytes_written * self.runs,
            "intensity": self.intensity,
        }


def launches(made: Iterable[Operation], work: Workload) -> list[Launch]:
    """In order of phase; with a fused kernel, scores, softmax and mix of an attention are one launch."""
    is_fused = work.kernel is Kernel.FUSED
    forward: list[Launch] = []
    backward: list[Launch] = []
    again: list[Launch] = []
    for is_one, group in groupby(made, key=lambda one: is_fused and one.is_attention_core):
        run = _fused if is_one else _single
        for operations in _attentions(list(group)) if is_one else ([one] for one in group):
            forward += run(operations, work.dtype)
            if work.mode is Mode.TRAIN:
                back = _fused_backward if is_one else _backward
                backward += back(operations, work.dtype)
                if work.checkpointing and operations[0].is_block:
                    again += run(operations, work.dtype, Phase.RECOMPUTE)
    return [*forward, *again, *reversed(backward)]


def _attentions(group: list[Operation]) -> list[list[Operation]]:
    """Scores, softmax, mix: three by three."""
    return [group[i : i + 3] for i in range(0, len(group), 3)]


def _single(operations: list[Operation], dtype: Precision, phase: Phase | None = None) -> list[Launch]:
    (one,) = operations
    read, written = one.forward_bytes(dtype, fused=False)
    launch = Launch(
        part=one.part,
        name=one.name,
        phase=phase or one.phase,
        runs=one.runs,
        kernels=one.kernels,
        products=() if one.product is None else (one.product,),
        visible=one.visible,
        elementwise=one.elementwise,
        bytes_read=read,
        bytes_written=written,
    )
    read, written = one.cast_bytes(dtype)
    if not written:
        return [launch]
    # Its weight brought to 16 bits, once a pass.
    cast = replace(
        launch, name=f"cast {one.name}", runs=one.copies, kernels=1, products=(), elementwise=0, bytes_read=read,
        bytes_written=written,
    )  # fmt: skip
    return [cast, launch]


def _fused(operations: list[Operation], dtype: Precision, phase: Phase | None = None) -> list[Launch]:
    first = operations[0]
    moved = [one.forward_bytes(dtype, fused=True) for one in operations]
    launch = Launch(
        part=first.part,
        name="attention",
        phase=phase or first.phase,
        runs=first.runs,
        kernels=min(one.kernels for one in operations),
        products=tuple(one.product for one in operations if one.product is not None),
        visible=first.visible,
        elementwise=sum(one.elementwise for one in operations),
        bytes_read=sum(read for read, _ in moved),
        bytes_written=sum(written for _, written in moved),
    )
    return [launch]


def _backward(operations: list[Operation], dtype: Precision) -> list[Launch]:
    """Products go back twice, everything else once."""
    (one,) = operations
    read, written = one.backward_bytes(dtype, fused=False)
    launch = Launch(
        part=one.part,
        name=one.name,
        phase=Phase.BACKWARD,
        runs=one.runs,
        # The two products, and a bias's sum.
        kernels=one.kernels * (1 if one.product is None else 2 + (one.elementwise > 0)),
        products=() if one.product is None else one.product.gradients,
        visible=one.visible,
        skipped=one.no_gradient * one.copies,
        elementwise=one.elementwise * 2,
        bytes_read=read,
        bytes_written=written,
    )
    return [launch]


def _fused_backward(operations: list[Operation], dtype: Precision) -> list[Launch]:
    """Reads Q, K, V, the result and its gradient; computes QKᵀ again; writes three gradients."""
    (forward,) = _fused(operations, dtype)
    scores, mix = forward.products
    moved = [one.backward_bytes(dtype, fused=True) for one in operations]
    launch = Launch(
        part=forward.part,
        name="attention",
        phase=Phase.BACKWARD,
        runs=forward.runs,
        kernels=3,  # the row sums of gradient · result, the kernel, dQ brought to its precision
        products=(scores, *scores.gradients, *mix.gradients),
        visible=forward.visible,
        elementwise=forward.elementwise * 2,
        bytes_read=sum(read for read, _ in moved),
        bytes_written=sum(written for _, written in moved),
    )
    return [launch]
