"""Count the parameters of a model and the FLOPs of a step: matmuls exactly, element-wise operations separately."""

from dataclasses import asdict, dataclass

from qkv.choices import AttentionKernel
from qkv.config import ModelConfig
from qkv.cost.operation import Operation, Phase
from qkv.cost.operations import list_operations
from qkv.cost.workload import Mode, Workload


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


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model without allocating them."""
    return group_parameters_by_part(list_operations(config, Workload(batch_size=1, seq_len=1)))


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


def count_flops(config: ModelConfig, workload: Workload) -> Flops:
    """Count the FLOPs of one step of a model."""
    return sum_flops(list_operations(config, workload), workload)


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
