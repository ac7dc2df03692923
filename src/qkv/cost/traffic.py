"""How many bytes a step moves: every operation for itself, or attention as one kernel."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from qkv.choices import Kernel
from qkv.cost.launch import Launch, launches
from qkv.cost.operation import Operation, Phase
from qkv.cost.update import Update
from qkv.cost.workload import Mode, Workload


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes read and written; a weight is read once a run, and under mixed precision brought to 16 bits once a pass.

    `unfused`: every operation reads and writes. `fused`: attention reads Q, K, V and writes its result, never n×n.
    """

    weights: int
    cache: int
    unfused: int
    """Forward."""
    fused: int
    backward_unfused: int = 0
    """With what checkpointing computes again."""
    backward_fused: int = 0
    update: int = 0
    """The optimizer's: AdamW moves 28 bytes a parameter at 32 bits, Muon 20."""
    clipping: int = 0
    """The gradients' norm, and their scaling."""

    def total(self, kernel: Kernel) -> int:
        passes = self.fused + self.backward_fused if kernel is Kernel.FUSED else self.unfused + self.backward_unfused
        return passes + self.update + self.clipping

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def traffic_of(made: list[Operation], work: Workload, update: Update) -> Traffic:
    unfused, fused = (launches(made, work.replace(kernel=kernel)) for kernel in (Kernel.PLAIN, Kernel.FUSED))
    of_update = update.launches(work.dtype) if work.mode is Mode.TRAIN else []
    return Traffic(
        weights=sum(one.weights * one.runs * _weight_size(one, work) for one in made),
        cache=sum(one.cache * one.runs for one in made) * work.dtype.narrow,
        unfused=_moved(unfused, is_forward=True),
        fused=_moved(fused, is_forward=True),
        backward_unfused=_moved(unfused, is_forward=False),
        backward_fused=_moved(fused, is_forward=False),
        update=sum(one.n_bytes for one in of_update if one.name != "clip"),
        clipping=sum(one.n_bytes for one in of_update if one.name == "clip"),
    )


def _weight_size(one: Operation, work: Workload) -> int:
    return work.dtype.wide if one.product is None or one.is_wide else work.dtype.narrow


def _moved(made: Iterable[Launch], *, is_forward: bool) -> int:
    later = (Phase.BACKWARD, Phase.RECOMPUTE)
    return sum(one.n_bytes for one in made if (one.phase not in later) == is_forward)
