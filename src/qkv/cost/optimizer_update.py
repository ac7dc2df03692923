"""Compute the state, FLOPs and memory traffic of an optimizer update, and the communication between devices."""

from dataclasses import asdict, dataclass

from qkv.choices import OptimizerKind
from qkv.cost.kernel_launch import KernelLaunch
from qkv.cost.operation import MatMul, Operation, Phase
from qkv.cost.workload import Precision, Sharding, Workload

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
