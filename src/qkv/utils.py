"""Small utilities that do not belong to any concept of the library."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

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


def gpu_name_or_cpu_threads(device: torch.device) -> str:
    """Return the name of the GPU or, for a CPU, the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n = torch.get_num_threads()
    return f"cpu, {n} thread{'s' if n > 1 else ''}"


def first_out_of_range(indices: Tensor, n: int) -> int | None:
    """Return an index outside 0 … n − 1, or `None` if there is none or if the values cannot be read cheaply.

    Reading values from a GPU would wait for the device, and compiled code cannot branch on them. Callers that use a GPU
    check their indices before they copy them to the device.
    """
    if not can_read_values(indices):
        return None
    low, high = (int(end) for end in indices.aminmax())
    return low if low < 0 else high if high >= n else None


def can_read_values(tensor: Tensor) -> bool:
    """Return whether the host can read the values of a tensor without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


@contextmanager
def autocast_disabled(device: torch.device) -> Iterator[bool]:
    """Disable autocast for operations on a device. Yields whether autocast was enabled."""
    # The meta device has no autocast.
    is_enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    if not is_enabled:
        yield False
        return
    with torch.autocast(device.type, enabled=False):
        yield True


class CudnnTF32Disabled:
    """Reentrant context manager that disables TF32 in cuDNN, which would change the fourth digit of recurrent states.

    The setting is global. The first thread to enter disables TF32, and the last one to leave restores it.
    """

    def __init__(self) -> None:
        self._lock, self._n_inside, self._previous = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._previous = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                torch.backends.cudnn.allow_tf32 = self._previous


CUDNN_TF32_DISABLED = CudnnTF32Disabled()
