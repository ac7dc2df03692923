"""Simulated GPU that detects operations on tensors of different devices.

A simulated GPU tensor wraps a CPU tensor, and operations are computed on the CPU. As on a real GPU, operations on
tensors of both devices fail, except for scalars, copies between the devices, and indexing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "simulated"
_setup_privateuseone_for_python_backend(NAME)
# The device is registered for the whole process. torch calls this function in activation checkpointing.
getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
GPU = torch.device(NAME, 0)
_CROSS_DEVICE_OPERATIONS = {
    "copy_",
    "_to_copy",
    "index",
    "index_put_",
    "index_put",
    "_index_put_impl_",
    "__getitem__",
    "__setitem__",
    "_pack_padded_sequence",
}


class SimulatedGPUTensor(Tensor):
    """Tensor on the simulated GPU that wraps a CPU tensor."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> "SimulatedGPUTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.size(),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=GPU,
            requires_grad=cpu_tensor.requires_grad,
        )
        tensor.cpu_tensor = cpu_tensor
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute_on_cpu(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    # These two methods make `Module.to` replace the parameters with wrapped tensors instead of copying the values.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["cpu_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> "SimulatedGPUTensor":
        return SimulatedGPUTensor(inner["cpu_tensor"])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimulatedGPUTensor({self.cpu_tensor!r})"


class _FactoryMode(TorchDispatchMode):
    """Intercepts the creation of tensors on the simulated GPU and copies to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute_on_cpu(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Intercepts functions that would require a real GPU implementation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(kwargs.get("device"))
        if args and isinstance(args[0], SimulatedGPUTensor) and func in _COMPUTED_ON_CPU:
            return _compute_on_cpu(func, args, kwargs)
        return func(*args, **kwargs)


_COMPUTED_ON_CPU = {
    torch.nn.functional.scaled_dot_product_attention,
    Tensor.tolist,
    Tensor.__getitem__,
    Tensor.__setitem__,
}


def _compute_on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    tensors = [tensor for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, Tensor)]
    has_gpu_tensor = any(isinstance(tensor, SimulatedGPUTensor) for tensor in tensors)
    name = getattr(func, "_schema", None)
    name = func.__name__ if name is None else name.name.removeprefix("aten::")
    if has_gpu_tensor and name not in _CROSS_DEVICE_OPERATIONS:
        cpu_tensors = [tensor for tensor in tensors if not isinstance(tensor, SimulatedGPUTensor) and tensor.ndim > 0]
        assert not cpu_tensors, (
            f"{name}: tensors on both devices; the CPU tensor has shape {tuple(cpu_tensors[0].shape)}"
        )
    to_gpu = has_gpu_tensor if device is None else torch.device(device).type == NAME
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    cpu_tensor = tree_map_only(SimulatedGPUTensor, lambda tensor: tensor.cpu_tensor, (args, kwargs))
    result = func(*cpu_tensor[0], **cpu_tensor[1])
    if name.endswith("_") and not name.endswith("__") and isinstance(tensors[0], SimulatedGPUTensor):
        return tensors[0]
    return tree_map_only(Tensor, SimulatedGPUTensor, result) if to_gpu else result


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Make `--device cuda` select the simulated GPU."""
    with (
        mock.patch("qkv.utils.resolve_device", return_value=GPU),
        mock.patch("qkv.tasks.loader.resolve_device", return_value=GPU),
        mock.patch("qkv.tasks.verification.resolve_device", return_value=GPU),
        _FactoryMode(),
        _FunctionMode(),
    ):
        yield
