"""How much a step computes: FLOPs of the matrix products, exact; element-wise work beside them."""

from dataclasses import asdict, dataclass

from qkv.choices import Kernel
from qkv.config import ModelConfig
from qkv.cost.operation import Operation, Phase
from qkv.cost.operations import operations
from qkv.cost.workload import Mode, Workload


@dataclass(frozen=True, kw_only=True)
class Flops:
    """2 a multiply–add, of matrix products alone. `useful`: what a mask lets count; the rest is executed in vain."""

    forward: int
    useful_forward: int
    backward: int = 0
    useful_backward: int = 0
    recomputed: int = 0
    """Forward work done again in backward: QKᵀ by a fused kernel, blocks by checkpointing."""
    decode: int = 0
    """Of forward, what a generation's decoding steps compute."""
    elementwise: int = 0
    """Of the forward pass: softmax, norms, activations, biases, adds."""

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed

    @property
    def useful(self) -> int:
        return self.useful_forward + self.useful_backward

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total, "useful": self.useful}


def flops(config: ModelConfig, work: Workload) -> Flops:
    return flops_of(operations(config, work), work)


def flops_of(made: list[Operation], work: Workload) -> Flops:
    is_training = work.mode is Mode.TRAIN
    return Flops(
        forward=sum(one.flops for one in made),
        useful_forward=sum(one.useful_flops for one in made),
        backward=sum(one.backward_flops for one in made) if is_training else 0,
        useful_backward=sum(one.useful_backward_flops for one in made) if is_training else 0,
        recomputed=sum(recomputed(one, work) for one in made) if is_training else 0,
        decode=sum(one.flops for one in made if one.phase is Phase.DECODE),
        elementwise=sum(one.elementwise_flops for one in made),
    )


def recomputed(one: Operation, work: Workload) -> int:
    """FLOPs of this operation that backward does once more."""
    again = 0
    if work.checkpointing and one.is_block:
        again += one.flops
    if work.kernel is Kernel.FUSED and one.is_attention_core and one.name == "scores":
        again += one.flops
    return again
