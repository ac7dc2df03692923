"""Published peak FLOP/s, memory bandwidth and memory size of common devices, and the time bound that they imply."""

from dataclasses import dataclass
from typing import Any

from qkv.config.base import did_you_mean_suffix
from qkv.cost.estimate import Estimate
from qkv.cost.kernel_launch import KernelLaunch
from qkv.cost.workload import DeviceType, Mode, Precision, Workload
from qkv.errors import InputError

_TERA, _GIGA = 1e12, 1e9
USABLE_MEMORY_FRACTION = 0.92
"""Fraction of device memory that is available to tensors. The driver, the allocator and libraries use the rest."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Specifications from a device's datasheet.

    The FLOP/s are peak rates for dense matmuls, which real programs do not reach.
    """

    name: str
    title: str
    float32: float
    """Peak float32 FLOP/s without TF32, which torch disables by default."""
    half: float
    """Peak FLOP/s for float16 and bfloat16 inputs with float32 accumulation."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: float
    """Memory size in bytes."""
    link_bandwidth: float
    """Bandwidth to other devices in the same machine, in bytes per second in each direction."""
    source: str

    @property
    def usable_memory(self) -> float:
        return USABLE_MEMORY_FRACTION * self.memory

    def peak_flops(self, dtype: Precision) -> float:
        """Return the peak matmul FLOP/s in the given precision."""
        return self.float32 if dtype is Precision.FLOAT32 else self.half

    @property
    def device_type(self) -> DeviceType:
        return DeviceType.CPU if self.name == "cpu" else DeviceType.CUDA

    def default_dtype(self, mode: Mode) -> Precision:
        """Return the default precision: float32 on a CPU, mixed for training on a GPU, and bfloat16 otherwise."""
        inference = Precision.FLOAT32 if self.device_type is DeviceType.CPU else Precision.BFLOAT16
        return inference.training_precision if mode is Mode.TRAIN else inference


_HOPPER = {"float32": 67 * _TERA, "half": 989.4 * _TERA, "link_bandwidth": 450 * _GIGA}

_DEVICE_LIST = (
    DeviceSpec(
        name="a100",
        title="NVIDIA A100 80GB SXM",
        float32=19.5 * _TERA,
        half=312 * _TERA,
        bandwidth=2039 * _GIGA,
        memory=80 * _GIGA,
        link_bandwidth=300 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU datasheet",
    ),
    DeviceSpec(
        name="h100",
        title="NVIDIA H100 SXM",
        **_HOPPER,
        bandwidth=3350 * _GIGA,
        memory=80 * _GIGA,
        source="NVIDIA H100 Tensor Core GPU datasheet; the 16-bit peak without sparsity: H100 Architecture whitepaper",
    ),
    DeviceSpec(
        name="h200",
        title="NVIDIA H200 SXM",
        **_HOPPER,
        bandwidth=4800 * _GIGA,
        memory=141 * _GIGA,
        source="NVIDIA H200 Tensor Core GPU datasheet; the 16-bit peak, published with sparsity, is that of the H100",
    ),
    DeviceSpec(
        name="b200",
        title="NVIDIA B200 (HGX)",
        float32=80 * _TERA,
        half=2250 * _TERA,
        bandwidth=8000 * _GIGA,
        memory=180 * _GIGA,
        link_bandwidth=900 * _GIGA,
        source="NVIDIA Blackwell Architecture Technical Brief; memory and bandwidth: an eighth of the 1,440 GB and "
        "64 TB/s in the DGX B200 datasheet",
    ),
    DeviceSpec(
        name="l4",
        title="NVIDIA L4",
        float32=30.3 * _TERA,
        half=121 * _TERA,
        bandwidth=300 * _GIGA,
        memory=24 * _GIGA,
        link_bandwidth=32 * _GIGA,
        source="NVIDIA L4 Tensor Core GPU datasheet; the 16-bit peak is half of the value published with sparsity",
    ),
    DeviceSpec(
        name="rtx4090",
        title="NVIDIA GeForce RTX 4090",
        float32=82.6 * _TERA,
        half=165.2 * _TERA,
        bandwidth=1008 * _GIGA,
        memory=24 * _GIGA,
        link_bandwidth=32 * _GIGA,
        source="NVIDIA Ada GPU Architecture whitepaper",
    ),
    DeviceSpec(
        name="mi300x",
        title="AMD Instinct MI300X",
        float32=163.4 * _TERA,
        half=1307.4 * _TERA,
        bandwidth=5300 * _GIGA,
        memory=192 * _GIGA,
        link_bandwidth=448 * _GIGA,
        source="AMD Instinct MI300X data sheet; link: seven links of 64 GB/s in each direction",
    ),
    DeviceSpec(
        name="cpu",
        title="two CPU cores with AVX2 at 3 GHz",
        float32=0.192 * _TERA,
        half=0.192 * _TERA,
        bandwidth=51.2 * _GIGA,
        memory=16 * _GIGA,
        link_bandwidth=10 * _GIGA,
        source="computed for a generic CPU: 2 cores × 3 GHz × 2 FMA units × 8 lanes × 2 FLOPs; two channels of "
        "DDR4-3200 (JEDEC JESD79-4)",
    ),
)

DEVICES: dict[str, DeviceSpec] = {device.name: device for device in _DEVICE_LIST}


def find_device(name: str) -> DeviceSpec:
    """Look up a device by name, ignoring case, spaces, hyphens and underscores."""
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if key not in DEVICES:
        raise InputError(
            f"unknown device '{name}'{did_you_mean_suffix(key, list(DEVICES))}; must be one of {', '.join(DEVICES)}"
        )
    return DEVICES[key]


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
