"""Plan a training run on a device: model shape, maximum batch size, time and cost."""

from dataclasses import dataclass
from math import log
from typing import Any

from qkv.config import GPTConfig, ModelConfig
from qkv.cost.devices import DeviceSpec, roofline_bound
from qkv.cost.estimate import Estimate, estimate_workload
from qkv.cost.workload import MAX_SIZE, Mode, Sharding, Workload
from qkv.errors import InputError

VOCAB_SIZES = ((50_000_000, 50257), (5_000_000, 8192), (0, 1024))
"""Minimum model size in parameters for each vocabulary size, so that the embedding does not dominate small models."""
DEFAULT_UTILIZATION = 0.4
"""Fraction of the peak FLOP/s that is typical for training large models (MFU)."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A plan for training on `tokens` tokens with `n_devices` devices.

    `batch_size` is the largest number of sequences that fit on one device, or 0 if not even one sequence fits.
    """

    config: ModelConfig
    device: DeviceSpec
    tokens: int
    seq_len: int
    n_devices: int
    sharding: Sharding
    utilization: int | float
    price: int | float | None
    """Price per device-hour."""
    batch_size: int
    step: Estimate
    """Estimate of one step with this batch size, or with one sequence if none fits."""

    @property
    def fits(self) -> bool:
        return self.batch_size > 0

    @property
    def flops(self) -> int:
        """Total FLOPs of the run."""
        workload = self.step.workload
        return self.step.flops.total * self.tokens // (workload.batch_size * workload.seq_len)

    @property
    def steps(self) -> int:
        """Number of updates. Each update processes one batch per device."""
        workload = self.step.workload
        return -(-self.tokens // (workload.batch_size * workload.seq_len * self.n_devices))

    @property
    def seconds(self) -> float:
        """Time in seconds at `utilization` of the peak, but at least the lower bound.

        Communication overlaps with computation.
        """
        return max(self.compute_seconds, self.bound_seconds)

    @property
    def bound_by(self) -> str:
        """The component that takes the longest: `compute`, `kernels` or `communication`."""
        times = {
            "compute": self.compute_seconds,
            "kernels": self.kernel_seconds,
            "communication": self.communication_seconds,
        }
        return max(times, key=lambda name: times[name])

    @property
    def compute_seconds(self) -> float:
        """Time in seconds to compute all FLOPs at `utilization` of the peak."""
        peak = self.device.peak_flops(self.step.workload.dtype)
        return self.flops / (peak * self.utilization * self.n_devices)

    @property
    def kernel_seconds(self) -> float:
        """Time in seconds if every kernel of eager torch runs at the peak or the bandwidth of the device."""
        return self.steps * roofline_bound(self.step, self.device).seconds

    @property
    def communication_seconds(self) -> float:
        return self.steps * self.step.communication.total / self.device.link_bandwidth

    @property
    def bound_seconds(self) -> float:
        """Lower bound on the time in seconds."""
        return max(self.kernel_seconds, self.communication_seconds)

    @property
    def cost(self) -> float | None:
        """Total cost, or None if no price is given."""
        return None if self.price is None else self.price * self.n_devices * self.seconds / 3600

    def fewest_fsdp_devices_workload(self) -> Workload | None:
        """Return a workload with the minimum number of FSDP devices on which one sequence fits, or None if none exists.

        Activation checkpointing is enabled only if it is needed.
        """
        for n in self.device_counts_to_try:
            for checkpointing in sorted({self.step.workload.activation_checkpointing, True}):
                changes = {"n_devices": n, "sharding": Sharding.FSDP, "activation_checkpointing": checkpointing}
                workload = self.step.workload.replace(batch_size=1, **changes)
                if _fits_in_memory(self.config, workload, self.device.usable_memory):
                    return workload
        return None

    @property
    def weight_cast_bytes_preventing_fit(self) -> int:
        """Size in bytes of the 16-bit weight copies if they prevent the step from fitting, otherwise 0.

        FSDP does not shard these copies.
        """
        changes = {
            "n_devices": self.device_counts_to_try[-1],
            "sharding": Sharding.FSDP,
            "activation_checkpointing": True,
        }
        memory = estimate_workload(self.config, self.step.workload.replace(batch_size=1, **changes)).memory
        usable, casts = self.device.usable_memory, memory.weight_casts
        is_blocking = casts > usable or memory.peak - casts <= usable < memory.peak
        return casts if is_blocking else 0

    @property
    def device_counts_to_try(self) -> list[int]:
        """The numbers of devices to try: `n_devices` multiplied by powers of two, up to a factor of 1024."""
        return [n for n in (self.n_devices << power for power in range(11)) if n <= MAX_SIZE]

    def as_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "config": self.config.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
            "parameters": self.step.parameters.total,
            "tokens": self.tokens,
            "device": self.device.name,
            "n_devices": self.n_devices,
            "sharding": self.sharding.value,
            "batch_size": self.batch_size,
            "memory": self.step.memory.as_dict(),
            "flops": self.flops,
            "steps": self.steps,
            "utilization": self.utilization,
            "seconds": self.seconds,
            "bound_seconds": self.bound_seconds,
            "communication_seconds": self.communication_seconds,
            "bound_by": self.bound_by,
            "cost": self.cost,
        }


def plan_training(
    config: ModelConfig,
    *,
    tokens: int,
    device: DeviceSpec,
    seq_len: int | None = None,
    n_devices: int = 1,
    sharding: Sharding = Sharding.DDP,
    utilization: int | float = DEFAULT_UTILIZATION,
    price: int | float | None = None,
    activation_checkpointing: bool = False,
) -> TrainingPlan:
    """Plan a training run with the largest batch size that fits. `price` is the price per device-hour."""
    if not 1 <= tokens <= MAX_SIZE:
        raise InputError(f"tokens must be between 1 and {MAX_SIZE}, got {tokens}")
    if not 0 < utilization <= 1:
        raise InputError(f"utilization must be greater than 0 and at most 1, got {utilization}")
    if price is not None and not 0 <= price < MAX_SIZE:
        raise InputError(f"price must be at least 0, got {price}")
    seq_len = config.context_length if seq_len is None else seq_len
    workload = Workload(
        batch_size=1,
        seq_len=seq_len,
        mode=Mode.TRAIN,
        dtype=device.default_dtype(Mode.TRAIN),
        device_type=device.device_type,
        n_devices=n_devices,
        sharding=sharding,
        activation_checkpointing=activation_checkpointing,
    )
    batch_size = max_batch_size(config, workload, memory=device.usable_memory)
    step = estimate_workload(config, workload.replace(batch_size=max(1, batch_size)))
    return TrainingPlan(
        config=config,
        device=device,
        tokens=tokens,
        seq_len=seq_len,
        n_devices=n_devices,
        sharding=sharding,
        utilization=utilization,
        price=price,
        batch_size=batch_size,
        step=step,
    )


def max_batch_size(config: ModelConfig, workload: Workload, *, memory: int | float) -> int:
    """Return the largest batch size for which a step fits in `memory` bytes, or 0 if not even one sequence fits."""

    def fits(batch_size: int) -> bool:
        return _fits_in_memory(config, workload.replace(batch_size=batch_size), memory)

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


def _fits_in_memory(config: ModelConfig, workload: Workload, memory: int | float) -> bool:
    return estimate_workload(config, workload).memory.peak <= memory


def gpt_config_for_size(n_parameters: int, *, context_length: int = 1024) -> GPTConfig:
    """Return a GPT-2 config with approximately the given number of parameters.

    The heads have a width of 64, and the model is about 30 to 130 times as wide as it is deep.
    """
    if not 10**6 <= n_parameters <= MAX_SIZE:
        raise InputError(f"params must be between {10**6} and {MAX_SIZE}, got {n_parameters}")
    vocab_size = next(size for minimum, size in VOCAB_SIZES if n_parameters >= minimum)
    narrowest = _candidate_widths()[0]
    min_embedding = (vocab_size + context_length) * narrowest
    if min_embedding > n_parameters:
        raise InputError(
            f"params must be at least {min_embedding}, the size of the embeddings of {vocab_size} tokens and "
            f"{context_length} positions at width {narrowest}, got {n_parameters}; reduce the sequence length or use "
            "--model"
        )
    candidates = []
    for d in _candidate_widths():
        embedding = (vocab_size + context_length) * d
        n_layers = max(1, round((n_parameters - embedding) / (12 * d * d)))
        error = abs(12 * n_layers * d * d + embedding - n_parameters) / n_parameters
        # A small deviation from the number of parameters is better than a large deviation from the usual width-to-depth
        # ratio of 64.
        candidates.append((error + 0.05 * abs(log(d / n_layers / 64)), n_layers, d))
    _, n_layers, d = min(candidates)
    return GPTConfig(
        vocab_size=vocab_size, context_length=context_length, d_model=d, n_heads=d // 64, n_layers=n_layers
    )


def _candidate_widths() -> list[int]:
    return [*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16384, 512), *range(16384, 1048577, 4096)]
