"""List the kernels of a step, including the optimizer update, and count the bytes that they move."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from qkv.choices import AttentionKernel, OptimizerKind
from qkv.cost.operation import MatMul, Operation, Phase
from qkv.cost.workload import Mode, Precision, Sharding, Workload


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


NEWTON_SCHULZ_STEPS = 5
ADAMW_OPS = 12
"""Number of element-wise operations per parameter: weight decay, two moments, two bias corrections, root, division,
addition."""
PARAMETERS_PER_KERNEL = 320 * 65536
"""Number of parameters that one multi-tensor kernel of torch processes (320 chunks of 65536 elements)."""


@dataclass(frozen=True, kw_only=True)
class MatrixGroup:
    """A group of `count` weight matrices with the same shape."""

    count: int
    d_out: int
    d_in: int

    @property
    def n_elements(self) -> int:
        return self.count * self.d_out * self.d_in

    @property
    def n_gram_elements(self) -> int:
        """Number of elements in the Gram matrices XXᵀ, which are formed along the shorter side."""
        return self.count * min(self.d_out, self.d_in) ** 2


@dataclass(frozen=True, kw_only=True)
class ParametersByOptimizer:
    """The parameters that each optimizer updates.

    AdamW keeps two moments per parameter. Muon updates the weight matrices of the blocks and keeps one moment per
    parameter.
    """

    by_adamw: int
    muon: tuple[MatrixGroup, ...] = ()

    @property
    def by_muon(self) -> int:
        return sum(group.n_elements for group in self.muon)

    @property
    def state_elements(self) -> int:
        """Number of elements in the optimizer state."""
        return 2 * self.by_adamw + self.by_muon

    def muon_temporary_bytes(self, dtype: Precision, *, on_gpu: bool) -> int:
        """Return the peak size of Muon's temporary tensors in bytes.

        Matrices of the same shape are updated as one stack. The temporary tensors are the look-ahead gradients and
        their stack in full precision, and two copies each of X and XXᵀ, which are bfloat16 on a GPU.
        """
        itemsize = 2 if on_gpu else dtype.param_itemsize
        by_shape: dict[tuple[int, int], list[MatrixGroup]] = {}
        for group in self.muon:
            by_shape.setdefault((group.d_out, group.d_in), []).append(group)
        return max(
            (
                sum(
                    2 * group.n_elements * dtype.param_itemsize
                    + 2 * (group.n_elements + group.n_gram_elements) * itemsize
                    for group in groups
                )
                for groups in by_shape.values()
            ),
            default=0,
        )

    def clipping_and_update_launches(self, dtype: Precision) -> list[KernelLaunch]:
        """List the kernels for gradient clipping and the optimizer update.

        AdamW reads the weight, the gradient and both moments and writes all but the gradient: 28 bytes per float32
        parameter.
        """
        n, itemsize = self.by_adamw + self.by_muon, dtype.param_itemsize
        launches = [
            # Clipping computes the norm of all gradients and then scales them.
            _multi_tensor_update_launch(
                "clip", n, ops_per_parameter=3, read_per_parameter=2 * itemsize, written_per_parameter=itemsize
            ),
            _multi_tensor_update_launch(
                "AdamW",
                self.by_adamw,
                ops_per_parameter=ADAMW_OPS,
                read_per_parameter=4 * itemsize,
                written_per_parameter=3 * itemsize,
            ),
        ]
        for group in self.muon:
            short, long = sorted((group.d_out, group.d_in))
            # One Newton–Schulz iteration: XXᵀ, (XXᵀ)² and their combination times X.
            matmuls = (
                MatMul(rows=short, inner=long, columns=short),
                MatMul(rows=short, inner=short, columns=short),
                MatMul(rows=short, inner=short, columns=long),
            )
            n_elements = group.d_out * group.d_in
            launches.append(
                KernelLaunch(
                    part="update",
                    name="Muon",
                    phase=Phase.UPDATE,
                    runs=group.count,
                    matmuls=matmuls * NEWTON_SCHULZ_STEPS,
                    elementwise=8 * n_elements,
                    bytes_read=3 * n_elements * itemsize,
                    bytes_written=2 * n_elements * itemsize,
                )
            )
        return launches


def split_device_parameters_by_optimizer(
    operations: list[Operation], n_parameters: int, workload: Workload
) -> ParametersByOptimizer:
    """Split the parameters that one device updates by optimizer.

    With FSDP, each device updates its shard. Muon distributes whole matrices, not slices of them.
    """
    n_shards = workload.n_devices if workload.sharding is Sharding.FSDP else 1
    if workload.optimizer is OptimizerKind.ADAMW:
        return ParametersByOptimizer(by_adamw=shard_size(n_parameters, n_shards))
    blocks = [op for op in operations if op.matmul is not None and op.parameters and op.is_block]
    muon = tuple(
        MatrixGroup(count=shard_size(op.copies, n_shards), d_out=op.matmul.columns, d_in=op.matmul.inner)
        for op in blocks
        if op.matmul is not None
    )
    n_matrix_elements = sum(op.matmul.inner * op.matmul.columns * op.copies for op in blocks if op.matmul is not None)
    return ParametersByOptimizer(by_adamw=shard_size(n_parameters - n_matrix_elements, n_shards), muon=muon)


def _multi_tensor_update_launch(
    name: str, n_parameters: int, *, ops_per_parameter: int, read_per_parameter: int, written_per_parameter: int
) -> KernelLaunch:
    """Build the launch of a multi-tensor update kernel.

    `read_per_parameter` and `written_per_parameter` are in bytes.
    """
    return KernelLaunch(
        part="update",
        name=name,
        phase=Phase.UPDATE,
        runs=1,
        kernels=1 + n_parameters // PARAMETERS_PER_KERNEL,
        elementwise=ops_per_parameter * n_parameters,
        bytes_read=read_per_parameter * n_parameters,
        bytes_written=written_per_parameter * n_parameters,
    )


@dataclass(frozen=True, kw_only=True)
class CommunicationBytes:
    """The number of bytes that each device sends per optimizer update with ring algorithms."""

    all_reduce: int = 0
    """Bytes sent for the gradients (DDP)."""
    all_gather: int = 0
    """Bytes sent for the weights, in the forward and backward passes of every micro-batch (FSDP)."""
    reduce_scatter: int = 0
    """Bytes sent for the gradients, of which each device keeps its shard of the sum (FSDP)."""

    @property
    def total(self) -> int:
        return self.all_reduce + self.all_gather + self.reduce_scatter

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def communication_volume(n_parameters: int, workload: Workload) -> CommunicationBytes:
    """Compute the number of bytes that each device sends, in the precision of the weights.

    FSDP communicates once per micro-batch, and DDP communicates once per update.
    """
    n = workload.n_devices
    ring_bytes = (n - 1) * shard_size(n_parameters, n) * workload.dtype.param_itemsize
    if workload.sharding is Sharding.DDP:
        # A ring all-reduce is a reduce-scatter followed by an all-gather.
        return CommunicationBytes(all_reduce=2 * ring_bytes)
    steps = workload.accumulation_steps
    return CommunicationBytes(all_gather=2 * ring_bytes * steps, reduce_scatter=ring_bytes * steps)


def shard_size(n_elements: int, n_devices: int) -> int:
    """Return the size of the largest shard when the elements are distributed evenly across devices."""
    return -(-n_elements // n_devices)


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
