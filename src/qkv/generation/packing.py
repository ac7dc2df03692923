"""Matrices laid out once as the CPU reads them fastest, for the many small steps of decoding.

A step multiplies a few rows by every weight. torch's usual product prepares the weights anew each time; oneDNN's takes
them prepared, which is 1.5 to 2.4 times as fast for 1 to 40 rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkv.nn import Unembedding

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Prepared:
    state: list[tuple[int, int]]
    made_of: list[Tensor]
    """Kept, so that no other weights can come to lie where these did and pass for them."""
    multiply: Product


class Packing:
    """Prepared copies of a model's weights; made at the first use, and anew where one has changed.

    A change through `.data` in place is one that torch does not count: it goes unseen.
    """

    def __init__(self, *parts: nn.Module) -> None:
        modules = [module for part in parts for module in part.modules()]
        self._modules = [one for one in modules if type(one) is nn.Linear or isinstance(one, Unembedding)]
        self._made: dict[tuple[nn.Module, ...], _Prepared] = {}

    @property
    def is_possible(self) -> bool:
        """For float32 on a CPU alone."""
        return all(_can_pack(module.weight) for module in self._modules)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, products use the prepared weights; results differ by rounding alone.

        Only for float32 on a CPU; elsewhere nothing changes.
        """
        changed = [module for module in self._modules if _can_pack(module.weight)]
        try:
            for module in changed:
                module.__dict__["forward"] = self._forward(module)
            yield
        finally:
            for module in changed:
                # Another thread may have been here meanwhile and taken it away: the usual product is as right.
                module.__dict__.pop("forward", None)

    def product(self, *modules: nn.Linear | Unembedding) -> Product:
        """x times the weights of these modules, one after another: their results side by side."""
        made = self._made.get(modules)
        state = [_state(tensor) for tensor in _tensors(modules)]
        if made is None or made.state != state:
            multiply = _product([one.weight for one in modules], [one.bias for one in modules])
            made = _Prepared(state, [one.detach() for one in _tensors(modules)], multiply)
            self._made[modules] = made
        return made.multiply

    def _forward(self, module: nn.Linear | Unembedding) -> Product:
        multiply = self.product(module)
        if not isinstance(module, Unembedding):
            return multiply
        return lambda x: module.logits(multiply(x * module.scale if module.scale != 1.0 else x))


def _tensors(modules: tuple[nn.Linear | Unembedding, ...]) -> list[Tensor]:
    return [tensor for one in modules for tensor in (one.weight, one.bias) if tensor is not None]


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _product(weights: list[Tensor], biases: list[Tensor | None]) -> Product:
    weight = torch.cat([one.detach() for one in weights])
    prepared = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - what torch.compile uses too
    multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    given = [one.detach() for one in biases if one is not None]
    bias = torch.cat(given) if given else None
    return lambda x: multiply(x, prepared, bias, "none", [], "")
