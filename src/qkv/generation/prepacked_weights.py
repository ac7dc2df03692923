"""Matrices laid out once as the CPU reads them fastest, for the many small steps of decoding.

A step multiplies a few rows by every weight. Which of torch's products is fastest depends on how many rows and numbers
there are; all of them want the weights laid out in their own way, which is done at the first use and kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import Activation
from qkv.generation.cuda_decode import CUDADecodeStepPool, tensor_version
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import Int8Linear, Unembedding, activate
from qkv.nn.huge_pages import contiguous

TINY = 2**15
"""Numbers in a matrix below which one row is multiplied fastest by the whole of it."""
SMALL = 2**17
"""Numbers in a matrix below which preparing oneDNN's call costs more than the call saves."""
FAR = 2**20
"""Numbers in a matrix that comes from memory each time: oneDNN multiplies 4 rows by it 1.2–1.7 times as fast as 2."""
BLOCK = 32
"""Columns of a block. Two threads read a matrix in such blocks as fast as memory gives, where one row times the whole
of it keeps one thread alone at work. 16 columns are about as fast, 64 are slower."""

FUSED = {Activation.RELU: ("relu", ""), Activation.GELU: ("gelu", "none"), Activation.GELU_TANH: ("gelu", "tanh")}
"""Activations that oneDNN has, by its names."""


class PackedLinear:
    """x times the weights of some modules, their results side by side; from torch's own only rounding differs."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._biases = [bias.detach() for bias in biases if bias is not None]
        self._bias = torch.cat(self._biases) if self._biases else None
        self._n_in, self._n_out = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
        self._n_numbers = self._n_in * self._n_out
        self._can_prepare = _has_onednn() and self._n_numbers >= SMALL
        self._has_blocks = torch.backends.mkl.is_available() and self._n_numbers >= TINY
        self._turned: Tensor | None = None
        self._prepared: Tensor | None = None
        self._blocks: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: (rows, width)."""
        if self._has_blocks and x.shape[0] == 1:
            blocks, bias = self._blocks if self._blocks is not None else self._in_blocks()
            found = torch.baddbmm(bias, x.expand(len(blocks), 1, self._n_in), blocks)
            return found.view(1, -1)[:, : self._n_out]
        if self._can_prepare and x.shape[0] > 1:
            return self._by_onednn(x)
        turned = self._turned if self._turned is not None else self._turn()
        return torch.mm(x, turned) if self._bias is None else torch.addmm(self._bias, x, turned)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """`activate` of the result; oneDNN does that while it writes it."""
        if self._can_prepare and x.shape[0] > 1 and activation in FUSED:
            return self._by_onednn(x, *FUSED[activation])
        return activate(self(x), activation)

    def into(self, x: Tensor, out: Tensor) -> None:
        if self._can_prepare or self._has_blocks:
            out.copy_(self(x))
            return
        turned = self._turned if self._turned is not None else self._turn()
        if self._bias is None:
            torch.mm(x, turned, out=out)
        else:
            torch.addmm(self._bias, x, turned, out=out)

    def onto(self, stream: Tensor, x: Tensor) -> None:
        """Add the result to `stream`."""
        if self._can_prepare or self._has_blocks:
            stream.add_(self(x))
            return
        stream.addmm_(x, self._turned if self._turned is not None else self._turn())
        if self._bias is not None:
            stream.add_(self._bias)

    def _in_blocks(self) -> tuple[Tensor, Tensor]:
        """(block, width, column) and (block, 1, column); the last block is filled up with zeros."""
        n_more = -self._n_out % BLOCK
        bias = self._weights[0].new_zeros(self._n_out) if self._bias is None else self._bias
        weight = F.pad(self._whole(), (0, 0, 0, n_more)).view(-1, BLOCK, self._n_in)
        self._blocks = contiguous(weight.transpose(1, 2)), F.pad(bias, (0, n_more)).view(-1, 1, BLOCK)
        return self._blocks

    def _turn(self) -> Tensor:
        weight = self._whole()
        # One row reads a matrix fastest along the longer of its sides.
        is_copied = weight.shape[0] >= weight.shape[1] or len(self._weights) > 1
        self._turned = contiguous(weight.T) if is_copied else weight.T
        return self._turned

    def _by_onednn(self, x: Tensor, then: str = "none", algorithm: str = "") -> Tensor:
        if self._prepared is None:
            self._prepared = torch.ops.mkldnn._reorder_linear_weight(self._whole())  # noqa: SLF001 - as torch.compile does
        multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        rows = x.shape[0]
        if rows < 4 and self._n_numbers >= FAR:
            return multiply(F.pad(x, (0, 0, 0, 4 - rows)), self._prepared, self._bias, then, [], algorithm)[:rows]
        return multiply(x, self._prepared, self._bias, then, [], algorithm)

    def _whole(self) -> Tensor:
        return self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)


class PackedInt8Linear:
    """As `PackedLinear`, in whole numbers."""

    def __init__(self, parts: Sequence[Int8Linear], scales: Sequence[float]) -> None:
        is_as_it_is = len(parts) == 1 and scales[0] == 1.0
        self._linear = parts[0] if is_as_it_is else Int8Linear.side_by_side(parts, scales)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear.forward(x)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return activate(self._linear.forward(x), activation)

    def into(self, x: Tensor, out: Tensor) -> None:
        (found, size), bias = self._linear.raw(x), self._linear.bias
        if size is None or bias is None:
            out.copy_(found if size is None else found.mul_(size))
            if bias is not None:
                out.add_(bias)
        else:
            torch.addcmul(bias, found, size, out=out)

    def onto(self, stream: Tensor, x: Tensor) -> None:
        found, size = self._linear.raw(x)
        if size is None:
            stream.add_(found)
        else:
            stream.addcmul_(found, size)
        if self._linear.bias is not None:
            stream.add_(self._linear.bias)


@dataclass(frozen=True)
class _Prepared:
    state: list[tuple[int, int]]
    multiply: PackedLinear | PackedInt8Linear
    kept: list[Tensor]
    """The weights, so that no others can come to lie where these did and pass for them."""


@contextmanager
def override_forward(
    modules: Sequence[nn.Linear | Unembedding], forward_of: Callable[[nn.Linear | Unembedding], Callable[..., Tensor]]
) -> Iterator[None]:
    """Inside, each module multiplies in the way that `forward_of` gives for it."""
    try:
        for module in modules:
            module.__dict__["forward"] = forward_of(module)
        yield
    finally:
        for module in modules:
            # Another thread may have been here meanwhile and taken it away: the usual product is as right.
            module.__dict__.pop("forward", None)


class PrepackedWeights:
    """Prepared copies of a model's weights; made at the first use, and anew where one has changed.

    A change through `.data` in place is one that torch does not count: it goes unseen.
    """

    def __init__(self, *parts: nn.Module) -> None:
        modules = [module for part in parts for module in part.modules()]
        self._modules = [one for one in modules if type(one) is nn.Linear or isinstance(one, Unembedding)]
        self._made: dict[tuple[nn.Module | float, ...], _Prepared] = {}
        self.gpu_steps: CUDADecodeStepPool | None = None
        """Of a GPT, for where it is on a GPU."""

    @property
    def is_possible(self) -> bool:
        """For float32 on a CPU alone."""
        return all(_can_pack(module.weight) for module in self._modules)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, products use the prepared weights; results differ by rounding alone.

        Only for float32 on a CPU; elsewhere nothing changes.
        """
        with override_forward(
            [one for one in self._modules if _can_pack(one.weight) and not _in_int8(one)], self._forward
        ):
            yield

    def product(
        self, *modules: nn.Linear | Unembedding | Int8Linear, first: float = 1.0
    ) -> PackedLinear | PackedInt8Linear:
        """x times the weights of these modules, one after another: their results side by side.

        `first`: what the first one's result is multiplied by.
        """
        made = self._made.get((*modules, first))
        in_int8 = [part for one in modules if (part := _in_int8(one)) is not None]
        floats = [one for one in modules if not in_int8 and not isinstance(one, Int8Linear)]
        tensors = _tensors(floats)
        state = [tensor_version(tensor) for tensor in tensors]
        if made is None or made.state != state:
            scales = [first, *[1.0] * (len(modules) - 1)]
            multiply = PackedInt8Linear(in_int8, scales) if in_int8 else _product(floats, scales)
            made = _Prepared(state, multiply, kept=[tensor.detach() for tensor in tensors])
            self._made[(*modules, first)] = made
        return made.multiply

    def _forward(self, module: nn.Linear | Unembedding) -> Callable[[Tensor], Tensor]:
        product = self.product(module)

        def multiply(x: Tensor) -> Tensor:
            return product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

        if not isinstance(module, Unembedding):
            return multiply
        return lambda x: module.logits(multiply(x * module.scale if module.scale != 1.0 else x))


def _product(modules: Sequence[nn.Linear | Unembedding], scales: Sequence[float]) -> PackedLinear:
    both = list(zip(modules, scales, strict=True))
    return PackedLinear(
        [_scale_to_unit(one.weight, scale) for one, scale in both],
        [None if one.bias is None else _scale_to_unit(one.bias, scale) for one, scale in both],
    )


def _scale_to_unit(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else tensor.detach() * scale


def _tensors(modules: Sequence[nn.Linear | Unembedding]) -> list[Tensor]:
    return [tensor for one in modules for tensor in (one.weight, one.bias) if tensor is not None]


def prepack_weights(model: GPT | Seq2Seq | RNNSeq2Seq) -> PrepackedWeights:
    """Of the half that writes."""
    if not isinstance(model, GPT):
        return PrepackedWeights(model.decoder, model.unembedding)
    packing = PrepackedWeights(model)
    packing.gpu_steps = CUDADecodeStepPool(model)
    return packing


def _in_int8(module: nn.Linear | Unembedding | Int8Linear) -> Int8Linear | None:
    return module.int8 if isinstance(module, Unembedding) else module if isinstance(module, Int8Linear) else None


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
