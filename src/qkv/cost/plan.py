"""What a training run takes on a device, before it is begun: shape, batch that fits, time, money."""

from dataclasses import dataclass
from math import log
from typing import Any

from qkv.config import GPTConfig, ModelConfig
from qkv.cost.devices import Device
from qkv.cost.estimate import Estimate, estimate_of
from qkv.cost.time import bound
from qkv.cost.workload import HUGE, Mode, Sharding, Workload
from qkv.errors import InputError

VOCABULARIES = ((50_000_000, 50257), (5_000_000, 8192), (0, 1024))
"""From how many parameters on a GPT has which vocabulary: a table must not be most of the model."""
SHARE = 0.4
"""Of the peak, what large models reach in training, unless said."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of `tokens` on `n_devices`; `batch` is what one device holds at once, 0: nothing fits."""

    config: ModelConfig
    device: Device
    tokens: int
    length: int
    n_devices: int
    sharding: Sharding
    share: int | float
    price: int | float | None
    batch: int
    step: Estimate
    """Of the batch that fits; of one sequence where none does."""

    @property
    def fits(self) -> bool:
        return self.batch > 0

    @property
    def flops(self) -> int:
        """Of the whole run: a token costs what it costs in this batch."""
        work = self.step.work
        return self.step.flops.total * self.tokens // (work.batch * work.length)

    @property
    def steps(self) -> int:
        """Updates of one batch a device."""
        work = self.step.work
        return -(-self.tokens // (work.batch * work.length * self.n_devices))

    @property
    def seconds(self) -> float:
        """At `share` of the peak, never under the bound; sending goes on meanwhile and counts where it is longer."""
        return max(self.computing, self.at_least)

    @property
    def bound_by(self) -> str:
        """Which of the three is that time: the work at `share`, the bound of the kernels, or sending."""
        times = {"computing": self.computing, "kernels": self.in_kernels, "sending": self.sending}
        return max(times, key=lambda name: times[name])

    @property
    def computing(self) -> float:
        return self.flops / (self.device.peak(self.step.work.dtype) * self.share * self.n_devices)

    @property
    def in_kernels(self) -> float:
        """Each of torch's eager kernels at the device's peak or bandwidth."""
        return self.steps * bound(self.step, self.device).seconds

    @property
    def sending(self) -> float:
        return self.steps * self.step.communication.total / self.device.link

    @property
    def at_least(self) -> float:
        """The bound."""
        return max(self.in_kernels, self.sending)

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.price * self.n_devices * self.seconds / 3600

    def way_to_fit(self) -> Workload | None:
        """The fewest devices, sharing all, that hold one text, and whether activations must be computed again."""
        for n in self.many_devices:
            for checkpointing in sorted({self.step.work.checkpointing, True}):
                changed = {"n_devices": n, "sharding": Sharding.FSDP, "checkpointing": checkpointing}
                work = self.step.work.replace(batch=1, **changed)
                if _fits(self.config, work, self.device.usable):
                    return work
        return None

    @property
    def casts_in_the_way(self) -> int:
        """Bytes of all weights at 16 bits, which every device holds, where it is they that do not fit; else 0."""
        most = {"n_devices": self.many_devices[-1], "sharding": Sharding.FSDP, "checkpointing": True}
        memory = estimate_of(self.config, self.step.work.replace(batch=1, **most)).memory
        usable = self.device.usable
        is_in_the_way = memory.casts > usable or memory.peak - memory.casts <= usable < memory.peak
        return memory.casts if is_in_the_way else 0

    @property
    def many_devices(self) -> list[int]:
        """Twice as many again and again, up to about a thousand times."""
        return [n for n in (self.n_devices << power for power in range(11)) if n <= HUGE]

    def as_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits, "config": self.config.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
            "parameters": self.step.parameters.total, "tokens": self.tokens, "device": self.device.name,
            "n_devices": self.n_devices, "sharding": self.sharding.value, "batch": self.batch,
            "memory": self.step.memory.as_dict(), "flops": self.flops, "steps": self.steps, "share": self.share,
            "seconds": self.seconds, "bound_seconds": self.at_least, "sending_seconds": self.sending,
            "bound_by": self.bound_by, "money": self.money,
        }  # fmt: skip


def plan(
    config: ModelConfig, *, tokens: int, device: Device, length: int | None = None, n_devices: int = 1,
    sharding: Sharding = Sharding.DDP, share: int | float = SHARE, price: int | float | None = None,
    checkpointing: bool = False,
) -> Plan:  # fmt: skip
    """`price`: money for a device and hour."""
    if not 1 <= tokens <= HUGE:
        raise InputError(f"tokens={tokens} must be from 1 to {HUGE}")
    if not 0 < share <= 1:
        raise InputError(f"share={share} must be above 0 and at most 1")
    if price is not None and not 0 <= price < HUGE:
        raise InputError(f"price={price} must be 0 or more")
    length = config.context_length if length is None else length
    work = Workload(
        batch=1, length=length, mode=Mode.TRAIN, dtype=device.usual_dtype(Mode.TRAIN), backend=device.backend,
        n_devices=n_devices, sharding=sharding, checkpointing=checkpointing,
    )  # fmt: skip
    batch = largest_batch(config, work, memory=device.usable)
    step = estimate_of(config, work.replace(batch=max(1, batch)))
    return Plan(
        config=config, device=device, tokens=tokens, length=length, n_devices=n_devices, sharding=sharding,
        share=share, price=price, batch=batch, step=step,
    )  # fmt: skip


def largest_batch(config: ModelConfig, work: Workload, *, memory: int | float) -> int:
    """The most sequences whose training step stays within that many bytes; 0: not even one."""

    def fits(batch: int) -> bool:
        return _fits(config, work.replace(batch=batch), memory)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > 2**20:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(config: ModelConfig, work: Workload, memory: int | float) -> bool:
    return estimate_of(config, work).memory.peak <= memory


def gpt_of(n_parameters: int, *, context_length: int = 1024) -> GPTConfig:
    """A GPT-2 of about so many parameters: heads of 64, some 30 to 130 times as wide as it has layers."""
    if not 10**6 <= n_parameters <= HUGE:
        raise InputError(f"params={n_parameters} must be from {10**6} to {HUGE} to make a GPT of them")
    n_words = next(size for least, size in VOCABULARIES if n_parameters >= least)
    narrowest = (n_words + context_length) * _widths()[0]
    if narrowest > n_parameters:
        raise InputError(
            f"params={n_parameters} is less than the {narrowest} of {n_words} words and {context_length} positions "
            f"of width {_widths()[0]}: a shorter length, or --model"
        )
    shapes = []
    for d in _widths():
        outside = (n_words + context_length) * d
        n_layers = max(1, round((n_parameters - outside) / (12 * d * d)))
        off = abs(12 * n_layers * d * d + outside - n_parameters) / n_parameters
        # A little off the size is better than far off the usual width of some 64 a layer.
        shapes.append((off + 0.05 * abs(log(d / n_layers / 64)), n_layers, d))
    _, n_layers, d = min(shapes)
    return GPTConfig(
        vocab_size=n_words, context_length=context_length, d_model=d, n_heads=d // 64, n_layers=n_layers
    )  # fmt: skip


def _widths() -> list[int]:
    return [*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16384, 512), *range(16384, 1048577, 4096)]
