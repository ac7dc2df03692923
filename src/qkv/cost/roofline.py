"""Lower bound on the time of a step from the roofline model: every kernel runs at peak FLOP/s or bandwidth."""

from dataclasses import dataclass
from typing import Any

from qkv.cost.devices import DeviceSpec
from qkv.cost.estimate import Estimate
from qkv.cost.kernel_launch import KernelLaunch
from qkv.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RooflineBound:
    """A lower bound on the time of a step: the sum over kernels of max(FLOPs / peak, bytes / bandwidth)."""

    device: DeviceSpec
    workload: Workload
    launches: tuple[KernelLaunch, ...]

    def kernel_seconds(self, launch: KernelLaunch) -> float:
        """Return the minimum time of a kernel in seconds, summed over all its runs.

        The fused attention kernel skips masked pairs, so only its useful FLOPs count. Other kernels compute all pairs.
        """
        is_fused = len(launch.matmuls) > 1
        flops = launch.useful_flops if is_fused else launch.flops
        return max(flops / self.device.peak_flops(self.workload.dtype), launch.n_bytes / self.device.bandwidth)

    def bound_by(self, launch: KernelLaunch) -> str:
        """Return the resource that limits a kernel on this device: `compute` or `memory`."""
        return launch.bound_by(peak=self.device.peak_flops(self.workload.dtype), bandwidth=self.device.bandwidth)

    @property
    def seconds(self) -> float:
        return sum(self.kernel_seconds(launch) for launch in self.launches)

    @property
    def compute_bound_fraction(self) -> float:
        """Fraction of the time spent in compute-bound kernels."""
        compute_bound = [launch for launch in self.launches if self.bound_by(launch) == "compute"]
        return sum(self.kernel_seconds(launch) for launch in compute_bound) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "seconds": self.seconds,
            "compute_bound_fraction": self.compute_bound_fraction,
        }


def roofline_bound(estimate: Estimate, device: DeviceSpec) -> RooflineBound:
    """Compute a lower bound on the time of an estimated step on the given device."""
    launches = tuple(launch for launch in estimate.launches if launch.flops or launch.n_bytes)
    return RooflineBound(device=device, workload=estimate.workload, launches=launches)
