"""A GPU that is none: its tensors lie in the CPU's memory, but mix with the CPU's no more than a real one's would.

A tensor that says `cuda` holds one of the CPU's. Operations are computed there; one that is given tensors of both
devices fails, as on a GPU, but for the mixtures that a GPU takes: numbers without an axis, copies from one to the
other, and indices.
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

NAME = "pretended"
_setup_privateuseone_for_python_backend(NAME)
# torch knows it from here on in this process, and asks this where it recomputes.
getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
GPU = torch.device(NAME, 0)
_COPIES = {
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


class OnGPU(Tensor):
    """Says that it is on a GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnGPU":
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=GPU, requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    # By these two torch knows that a module's weights must be swapped for such tensors, not filled with their numbers.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> "OnGPU":
        return OnGPU(inner["held"])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnGPU({self.held!r})"


class _Factories(TorchDispatchMode):
    """What is made on `cuda`, or brought there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """What torch does below its operations, where it would need a real GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(kwargs.get("device"))
        if args and isinstance(args[0], OnGPU) and func in _BELOW:
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


_BELOW = {
    torch.nn.functional.scaled_dot_product_attention, Tensor.tolist, Tensor.__getitem__, Tensor.__setitem__
}  # fmt: skip


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    asked = kwargs.get("device")
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = any(isinstance(one, OnGPU) for one in given)
    name = getattr(func, "_schema", None)
    name = func.__name__ if name is None else name.name.removeprefix("aten::")
    if there and name not in _COPIES:
        strange = [one for one in given if not isinstance(one, OnGPU) and one.ndim > 0]
        assert not strange, f"{name}: its tensors are on both devices; on the CPU one of {tuple(strange[0].shape)}"
    to_gpu = there if asked is None else torch.device(asked).type == NAME
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held = tree_map_only(OnGPU, lambda one: one.held, (args, kwargs))
    result = func(*held[0], **held[1])
    if name.endswith("_") and not name.endswith("__") and isinstance(given[0], OnGPU):
        return given[0]
    return tree_map_only(Tensor, OnGPU, result) if to_gpu else result


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, `--device cuda` is it."""
    with (
        mock.patch("qkv.tasks.loading.torch_device", return_value=GPU),
        mock.patch("qkv.tasks.verifying.torch_device", return_value=GPU),
        _Factories(),
        _Calls(),
    ):
        yield
