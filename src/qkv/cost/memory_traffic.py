"""Count the bytes that a step reads from and writes to device memory, with and without fused attention."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from qkv.choices import AttentionKernel
from qkv.cost.kernel_launch import KernelLaunch, list_kernel_launches
from qkv.cost.operation import Operation, Phase
from qkv.cost.optimizer_update import ParametersByOptimizer
from qkv.cost.workload import Mode, Workload


@dataclass(frozen=True, kw_only=True)
class MemoryTraffic:
    """The number of bytes that a step reads and writes.

    Weights are read once per run and, under autocast, cast to 16 bits once per pass. `forward_unfused` assumes that
    every operation reads its inputs and writes its outputs. `forward_fused` assumes that attention reads Q, K and V and
    writes its output, but never an n×n matrix.
    """

    weights: int
    cache: int
    forward_unfused: int
    """Bytes moved by the forward pass without fused attention."""
    forward_fused: int
    """Bytes moved by the forward pass with fused attention."""
    backward_unfused: int = 0
    """Bytes moved by the backward pass, including the forward work that activation checkpointing repeats."""
    backward_fused: int = 0
    update: int = 0
    """Bytes moved by the optimizer update. AdamW moves 28 bytes per float32 parameter, and Muon moves 20."""
    clipping: int = 0
    """Bytes moved to compute the gradient norm and scale the gradients."""

    def total(self, kernel: AttentionKernel) -> int:
        """Return the total bytes moved in a step with the given attention kernel."""
        is_fused = kernel is AttentionKernel.FUSED
        passes = self.forward_fused + self.backward_fused if is_fused else self.forward_unfused + self.backward_unfused
        return passes + self.update + self.clipping

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def estimate_traffic(operations: list[Operation], workload: Workload, update: ParametersByOptimizer) -> MemoryTraffic:
    """Compute the total memory traffic of a step in bytes."""
    unfused = list_kernel_launches(operations, workload.replace(kernel=AttentionKernel.EAGER))
    fused = list_kernel_launches(operations, workload.replace(kernel=AttentionKernel.FUSED))
    update_launches = update.clipping_and_update_launches(workload.dtype) if workload.mode is Mode.TRAIN else []
    return MemoryTraffic(
        weights=sum(op.weights * op.runs * _weight_itemsize(op, workload) for op in operations),
        cache=sum(op.cache * op.runs for op in operations) * workload.dtype.matmul_itemsize,
        forward_unfused=_sum_bytes(unfused, is_forward=True),
        forward_fused=_sum_bytes(fused, is_forward=True),
        backward_unfused=_sum_bytes(unfused, is_forward=False),
        backward_fused=_sum_bytes(fused, is_forward=False),
        update=sum(launch.n_bytes for launch in update_launches if launch.name != "clip"),
        clipping=sum(launch.n_bytes for launch in update_launches if launch.name == "clip"),
    )


def _weight_itemsize(op: Operation, workload: Workload) -> int:
    is_fp32 = op.matmul is None or op.autocast_fp32
    return workload.dtype.param_itemsize if is_fp32 else workload.dtype.matmul_itemsize


def _sum_bytes(launches: Iterable[KernelLaunch], *, is_forward: bool) -> int:
    """Sum the bytes moved in the forward pass, or in the backward pass including recomputation."""
    backward = (Phase.BACKWARD, Phase.RECOMPUTE)
    return sum(launch.n_bytes for launch in launches if (launch.phase not in backward) == is_forward)
