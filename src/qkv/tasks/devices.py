"""Convert device and dtype names to torch objects."""

import torch

from qkv.choices import InferenceDType
from qkv.errors import InputError

DEVICE_NAMES = ("cpu", "cuda", "auto")


def resolve_device(name: str) -> torch.device:
    """Return the torch device for `cpu`, `cuda` or `auto` (a GPU if available).

    If a GPU is requested but not available, this function raises an error instead of silently using the CPU.
    """
    if name not in DEVICE_NAMES:
        raise InputError(f"--device {name}: must be one of cpu, cuda, auto")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        cuda_version = torch.version.cuda
        reason = (
            "was built without CUDA" if cuda_version is None else f"was built with CUDA {cuda_version} but found no GPU"
        )
        raise InputError(f"--device cuda: PyTorch {torch.__version__} {reason}; use --device cpu instead")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def require_cpu_for_int8(name: str) -> torch.device:
    """Return the CPU device for `cpu` or `auto`, and raise an error for any other name.

    Int8 models only run on a CPU because they use FBGEMM.
    """
    if name == "cuda":
        raise InputError("--int8 (int8=True) requires a CPU and cannot be combined with --device cuda")
    return resolve_device("cpu" if name == "auto" else name)


def resolve_dtype(name: InferenceDType | str, device: torch.device) -> torch.dtype:
    """Return the torch dtype with a given name, and raise an error if it is not supported on the device.

    bfloat16 requires a GPU because CPUs without AMX are up to 60 times slower with bfloat16.
    """
    if name not in list(InferenceDType):
        raise InputError(f"--dtype {name}: must be one of {', '.join(InferenceDType)}")
    if name == InferenceDType.BFLOAT16 and device.type == "cpu":
        raise InputError("--dtype bfloat16 requires a GPU; on a CPU, bfloat16 is slower and less accurate than float32")
    return torch.bfloat16 if name == InferenceDType.BFLOAT16 else torch.float32
