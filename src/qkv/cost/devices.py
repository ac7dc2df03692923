"""What the makers say a device can do: peak rates without sparsity, bandwidth and memory, each with its source."""

import re
from dataclasses import dataclass

from qkv.config.base import nearest
from qkv.cost.workload import Backend, Mode, Precision
from qkv.errors import InputError

_TERA, _GIGA = 1e12, 1e9
USABLE = 0.92
"""Of a device's memory; the rest is the driver's, the allocator's and the libraries'."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peaks of dense products, FLOP/s; no program reaches them."""

    name: str
    title: str
    float32: float
    """Without TF32, which torch leaves off unless asked."""
    half: float
    """float16 and bfloat16, added up in float32."""
    bandwidth: float
    """Bytes a second from its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes a second to other devices of the machine, in one direction."""
    source: str

    @property
    def usable(self) -> float:
        return USABLE * self.memory

    def peak(self, dtype: Precision) -> float:
        return self.float32 if dtype is Precision.FLOAT32 else self.half

    @property
    def backend(self) -> Backend:
        return Backend.CPU if self.name == "cpu" else Backend.CUDA

    def usual_dtype(self, mode: Mode) -> Precision:
        """What torch uses there: 32 bits on a CPU, 16 on a GPU, weights kept at 32 in training."""
        of_inference = Precision.FLOAT32 if self.backend is Backend.CPU else Precision.BFLOAT16
        return of_inference.in_training if mode is Mode.TRAIN else of_inference


_HOPPER = {"float32": 67 * _TERA, "half": 989.4 * _TERA, "link": 450 * _GIGA}

_IN_ORDER = (
    Device(
        name="a100", title="NVIDIA A100 80GB SXM", float32=19.5 * _TERA, half=312 * _TERA, bandwidth=2039 * _GIGA,
        memory=80 * _GIGA, link=300 * _GIGA, source="NVIDIA A100 Tensor Core GPU datasheet",
    ),
    Device(
        name="h100", title="NVIDIA H100 SXM", **_HOPPER, bandwidth=3350 * _GIGA, memory=80 * _GIGA,
        source="NVIDIA H100 Tensor Core GPU datasheet; the 16-bit peak without sparsity: H100 Architecture whitepaper",
    ),
    Device(
        name="h200", title="NVIDIA H200 SXM", **_HOPPER, bandwidth=4800 * _GIGA, memory=141 * _GIGA,
        source="NVIDIA H200 Tensor Core GPU datasheet; the 16-bit peak, given with sparsity, as the H100's",
    ),
    Device(
        name="b200", title="NVIDIA B200 (HGX)", float32=80 * _TERA, half=2250 * _TERA, bandwidth=8000 * _GIGA,
        memory=180 * _GIGA, link=900 * _GIGA,
        source="NVIDIA Blackwell Architecture Technical Brief; memory and its bandwidth: an eighth of the DGX B200 "
        "datasheet's 1,440 GB and 64 TB/s",
    ),
    Device(
        name="l4", title="NVIDIA L4", float32=30.3 * _TERA, half=121 * _TERA, bandwidth=300 * _GIGA,
        memory=24 * _GIGA, link=32 * _GIGA,
        source="NVIDIA L4 Tensor Core GPU datasheet; its 16-bit peak, given with sparsity, halved",
    ),
    Device(
        name="rtx4090", title="NVIDIA GeForce RTX 4090", float32=82.6 * _TERA, half=165.2 * _TERA,
        bandwidth=1008 * _GIGA, memory=24 * _GIGA, link=32 * _GIGA, source="NVIDIA Ada GPU Architecture whitepaper",
    ),
    Device(
        name="mi300x", title="AMD Instinct MI300X", float32=163.4 * _TERA, half=1307.4 * _TERA,
        bandwidth=5300 * _GIGA, memory=192 * _GIGA, link=448 * _GIGA,
        source="AMD Instinct MI300X data sheet; link: seven of 64 GB/s each way",
    ),
    Device(
        name="cpu", title="two CPU cores with AVX2 at 3 GHz", float32=0.192 * _TERA, half=0.192 * _TERA,
        bandwidth=51.2 * _GIGA, memory=16 * _GIGA, link=10 * _GIGA,
        source="by arithmetic, not a product's: 2 cores × 3 GHz × 2 FMA units × 8 lanes × 2; two channels of "
        "DDR4-3200 (JEDEC JESD79-4)",
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _IN_ORDER}


def is_called(name: str, full_name: str) -> bool:
    """Whether a name of this table is that of a device which calls itself `full_name`: h200, NVIDIA H200."""
    return re.search(rf"{re.escape(name)}(?!\d)", full_name.lower().replace(" ", "")) is not None


def find_device(name: str) -> Device:
    plain = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if plain not in DEVICES:
        raise InputError(f"unknown device '{name}'{nearest(plain, list(DEVICES))}; known: {', '.join(DEVICES)}")
    return DEVICES[plain]
