"""How long a step must take at the least: each kernel as fast as the device's peak or its memory lets it be."""

from dataclasses import dataclass
from typing import Any

from qkv.cost.devices import Device
from qkv.cost.estimate import Estimate
from qkv.cost.launch import Launch
from qkv.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Bound:
    """No program on this device is faster: Σ max(FLOPs / peak, bytes / bandwidth) over the kernels."""

    device: Device
    work: Workload
    launches: tuple[Launch, ...]

    def of(self, launch: Launch) -> float:
        """Seconds of one kernel, all its runs. A fused kernel leaves out what the mask hides; a plain one cannot."""
        is_fused = len(launch.products) > 1
        flops = launch.useful_flops if is_fused else launch.flops
        return max(flops / self.device.peak(self.work.dtype), launch.n_bytes / self.device.bandwidth)

    def what_bounds(self, launch: Launch) -> str:
        return launch.bound_by(peak=self.device.peak(self.work.dtype), bandwidth=self.device.bandwidth)

    @property
    def seconds(self) -> float:
        return sum(self.of(one) for one in self.launches)

    @property
    def share_computing(self) -> float:
        """Of the time, in kernels that wait for the peak and not for memory."""
        return sum(self.of(one) for one in self.launches if self.what_bounds(one) == "compute") / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {"device": self.device.name, "seconds": self.seconds, "share_computing": self.share_computing}


def bound(estimate: Estimate, device: Device) -> Bound:
    launches = tuple(one for one in estimate.launches if one.flops or one.n_bytes)
    return Bound(device=device, work=estimate.work, launches=launches)
