"""What an optimizer keeps, computes and moves for one update, and what devices send each other for it."""

from dataclasses import asdict, dataclass

from qkv.choices import OptimizerKind
from qkv.cost.launch import Launch
from qkv.cost.operation import Operation, Phase, Product
from qkv.cost.workload import Precision, Sharding, Workload

NEWTON_SCHULZ_STEPS = 5
ADAMW_WORK = 12  # element-wise operations a parameter: decay, two moments, two corrections, root, divide, add
CHUNKS_A_KERNEL = 320 * 65536  # parameters that one of torch's multi-tensor kernels takes


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """`count` weight matrices of one shape."""

    count: int
    d_out: int
    d_in: int

    @property
    def numbers(self) -> int:
        return self.count * self.d_out * self.d_in

    @property
    def n_grams(self) -> int:
        """Numbers of their XXᵀ, by the shorter side."""
        return self.count * min(self.d_out, self.d_in) ** 2


@dataclass(frozen=True, kw_only=True)
class Update:
    """Parameters by who updates them: AdamW keeps two moments of each, Muon one of the blocks' matrices."""

    by_adamw: int
    muon: tuple[Matrices, ...] = ()

    @property
    def by_muon(self) -> int:
        return sum(one.numbers for one in self.muon)

    @property
    def kept_numbers(self) -> int:
        return 2 * self.by_adamw + self.by_muon

    def working_bytes(self, dtype: Precision, *, on_gpu: bool) -> int:
        """Muon's copies of one shape's matrices: ahead, stacked, and (at 16 bits on a GPU) X twice and XXᵀ twice."""
        size = 2 if on_gpu else dtype.wide
        alike: dict[tuple[int, int], list[Matrices]] = {}
        for one in self.muon:
            alike.setdefault((one.d_out, one.d_in), []).append(one)
        return max(
            (
                sum(2 * one.numbers * dtype.wide + 2 * (one.numbers + one.n_grams) * size for one in group)
                for group in alike.values()
            ),
            default=0,
        )

    def launches(self, dtype: Precision) -> list[Launch]:
        """AdamW reads weight, gradient and moments, writes all but the gradient: 28 bytes a parameter at 32 bits."""
        n, size = self.by_adamw + self.by_muon, dtype.wide
        made = [
            # The norm of all gradients, then their scaling.
            _launch("clip", n, work=3, reads=2 * size, writes=size),
            _launch("AdamW", self.by_adamw, work=ADAMW_WORK, reads=4 * size, writes=3 * size),
        ]
        for one in self.muon:
            a, b = sorted((one.d_out, one.d_in))
            products = (
                Product(rows=a, inner=b, columns=a),
                Product(rows=a, inner=a, columns=a),
                Product(rows=a, inner=a, columns=b),
            )
            once = one.d_out * one.d_in
            made.append(
                Launch(
                    part="update", name="Muon", phase=Phase.UPDATE, runs=one.count,
                    products=products * NEWTON_SCHULZ_STEPS, elementwise=8 * once, bytes_read=3 * once * size,
                    bytes_written=2 * once * size,
                )
            )  # fmt: skip
        return made


def update_of(made: list[Operation], n_parameters: int, work: Workload) -> Update:
    """What each device updates: with FSDP its part, Muon's matrices dealt out whole."""
    n = work.n_devices if work.sharding is Sharding.FSDP else 1
    if work.optimizer is OptimizerKind.ADAMW:
        return Update(by_adamw=shard(n_parameters, n))
    blocks = [one for one in made if one.product is not None and one.parameters and one.is_block]
    muon = tuple(
        Matrices(count=shard(one.copies, n), d_out=one.product.columns, d_in=one.product.inner)
        for one in blocks
        if one.product is not None
    )
    matrices = sum(one.product.inner * one.product.columns * one.copies for one in blocks if one.product is not None)
    return Update(by_adamw=shard(n_parameters - matrices, n), muon=muon)


def _launch(name: str, n: int, *, work: int, reads: int, writes: int) -> Launch:
    kernels = 1 + n // CHUNKS_A_KERNEL
    return Launch(
        part="update", name=name, phase=Phase.UPDATE, runs=1, kernels=kernels, elementwise=work * n,
        bytes_read=reads * n, bytes_written=writes * n,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that each device sends in one update; a ring sends every device's part to all others."""

    all_reduce: int = 0
    """DDP: the gradients, added up by all."""
    all_gather: int = 0
    """FSDP: the weights, for the forward and again for the backward pass of every batch."""
    reduce_scatter: int = 0
    """FSDP: the gradients, each device keeping its part of the sum."""

    @property
    def total(self) -> int:
        return self.all_reduce + self.all_gather + self.reduce_scatter

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def communication_of(n_parameters: int, work: Workload) -> Communication:
    """At the weights' precision; FSDP gathers and scatters once a batch, DDP adds up once an update."""
    n = work.n_devices
    sent = (n - 1) * shard(n_parameters, n) * work.dtype.wide
    if work.sharding is Sharding.DDP:
        return Communication(all_reduce=2 * sent)
    return Communication(all_gather=2 * sent * work.accumulation, reduce_scatter=sent * work.accumulation)


def shard(numbers: int, n_devices: int) -> int:
    """The largest part of numbers dealt out evenly."""
    return -(-numbers // n_devices)
