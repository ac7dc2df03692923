"""Where does a model compute, and in which numbers?"""

import torch

from qkv.choices import DType
from qkv.errors import InputError

DEVICE_NAMES = ("cpu", "cuda", "auto")


def resolve_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one. A GPU that is asked for and not there is an error, never a CPU in its place."""
    if name not in DEVICE_NAMES:
        raise InputError(f"--device {name}: it is cpu, cuda or auto")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        built = torch.version.cuda
        why = "has no CUDA" if built is None else f"has CUDA {built}, but sees no GPU"
        raise InputError(f"--device cuda: this torch ({torch.__version__}) {why}; --device cpu computes here")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def resolve_int8_device(name: str) -> torch.device:
    """int8 arithmetic is a CPU's (FBGEMM), so `auto` is the CPU there."""
    if name == "cuda":
        raise InputError("--int8 (int8=True) computes on a CPU alone, and --device cuda was asked for: choose one")
    return resolve_device("cpu" if name == "auto" else name)


def resolve_dtype(name: DType | str, device: torch.device) -> torch.dtype:
    """16-bit numbers on a GPU alone: a CPU without AMX multiplies them up to 60 times as slowly as 32-bit ones."""
    if name not in list(DType):
        raise InputError(f"--dtype {name}: it is {' or '.join(DType)}")
    if name == DType.BFLOAT16 and device.type == "cpu":
        raise InputError("--dtype bfloat16 is for a GPU: on this CPU it would be slower than float32, and less exact")
    return torch.bfloat16 if name == DType.BFLOAT16 else torch.float32
