"""Linear layers with weights prepacked for fast CPU matmuls with few rows, as in decode steps.

A decode step multiplies a few rows by every weight matrix. Which of torch's matmuls is fastest depends on the number of
rows and the size of the matrix. Each of them requires its own weight layout, which is created on first use and reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.cpu.huge_pages import contiguous_in_huge_pages
from qkv.accel.cpu.onednn_linear import MIN_ONEDNN_SIZE, has_onednn
from qkv.accel.int8 import Int8Linear, Int8Unembedding
from qkv.accel.support import tensor_version
from qkv.choices import Activation
from qkv.nn import Unembedding
from qkv.nn.block import activate

MIN_BLOCKED_SIZE = 2**15
"""Matrix size in elements from which a single row is multiplied by column blocks rather than the full matrix."""
MIN_PADDED_SIZE = 2**20
"""Matrix size in elements that exceeds the CPU caches.

For such matrices, oneDNN multiplies 4 rows 1.2–1.7 times as fast as 2 rows.
"""
BLOCK_COLUMNS = 32
"""Number of columns per block.

With blocks, two threads read a matrix at full memory bandwidth, whereas multiplying one row by the full matrix uses a
single thread. Blocks of 16 columns are about as fast, and blocks of 64 columns are slower.
"""

ONEDNN_ACTIVATIONS = {
    Activation.RELU: ("relu", ""),
    Activation.GELU: ("gelu", "none"),
    Activation.GELU_TANH: ("gelu", "tanh"),
}
"""oneDNN's names for the activations that it can fuse into a matmul."""


class ConcatenatedLinear:
    """Linear layer that computes the concatenated outputs of several modules. Results differ only by rounding."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._biases = [bias.detach() for bias in biases if bias is not None]
        self._bias = torch.cat(self._biases) if self._biases else None
        self._n_in, self._n_out = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
        self._n_elements = self._n_in * self._n_out
        self._uses_onednn = has_onednn() and self._n_elements >= MIN_ONEDNN_SIZE
        self._uses_blocks = torch.backends.mkl.is_available() and self._n_elements >= MIN_BLOCKED_SIZE
        # The packed copies are created on first use.
        self._transposed: Tensor | None = None
        self._onednn_weight: Tensor | None = None
        self._blocks: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` of shape (rows, n_in)."""
        if self._uses_blocks and x.shape[0] == 1:
            blocks, bias = self._blocks if self._blocks is not None else self._pack_weight_and_bias()
            y = torch.baddbmm(bias, x.expand(len(blocks), 1, self._n_in), blocks)
            return y.view(1, -1)[:, : self._n_out]
        if self._uses_onednn and x.shape[0] > 1:
            return self._onednn_linear(x)
        transposed = self._transposed if self._transposed is not None else self._cache_transposed_weight()
        return torch.mm(x, transposed) if self._bias is None else torch.addmm(self._bias, x, transposed)

    def forward_activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply the layer and the activation, fused into a single oneDNN call if possible."""
        if self._uses_onednn and x.shape[0] > 1 and activation in ONEDNN_ACTIVATIONS:
            return self._onednn_linear(x, *ONEDNN_ACTIVATIONS[activation])
        return activate(self(x), activation)

    def write_to(self, x: Tensor, out: Tensor) -> None:
        """Write the result to `out`."""
        if self._uses_onednn or self._uses_blocks:
            out.copy_(self(x))
            return
        transposed = self._transposed if self._transposed is not None else self._cache_transposed_weight()
        if self._bias is None:
            torch.mm(x, transposed, out=out)
        else:
            torch.addmm(self._bias, x, transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the result to `residual` in place."""
        if self._uses_onednn or self._uses_blocks:
            residual.add_(self(x))
            return
        residual.addmm_(x, self._transposed if self._transposed is not None else self._cache_transposed_weight())
        if self._bias is not None:
            residual.add_(self._bias)

    def _pack_weight_and_bias(self) -> tuple[Tensor, Tensor]:
        """Pack weight and bias as (block, n_in, column) and (block, 1, column). The last block is padded with zeros."""
        n_padding = -self._n_out % BLOCK_COLUMNS
        bias = self._weights[0].new_zeros(self._n_out) if self._bias is None else self._bias
        weight = F.pad(self._concatenated_weight(), (0, 0, 0, n_padding)).view(-1, BLOCK_COLUMNS, self._n_in)
        self._blocks = (
            contiguous_in_huge_pages(weight.transpose(1, 2)),
            F.pad(bias, (0, n_padding)).view(-1, 1, BLOCK_COLUMNS),
        )
        return self._blocks

    def _cache_transposed_weight(self) -> Tensor:
        weight = self._concatenated_weight()
        # A single row is multiplied fastest if the longer side of the matrix is contiguous.
        is_copied = weight.shape[0] >= weight.shape[1] or len(self._weights) > 1
        self._transposed = contiguous_in_huge_pages(weight.T) if is_copied else weight.T
        return self._transposed

    def _onednn_linear(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        if self._onednn_weight is None:
            # torch.compile uses the same private operators.
            weight = self._concatenated_weight()
            self._onednn_weight = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001
        linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        rows = x.shape[0]
        if rows < 4 and self._n_elements >= MIN_PADDED_SIZE:
            padded = F.pad(x, (0, 0, 0, 4 - rows))
            return linear(padded, self._onednn_weight, self._bias, activation, [], algorithm)[:rows]
        return linear(x, self._onednn_weight, self._bias, activation, [], algorithm)

    def _concatenated_weight(self) -> Tensor:
        return self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)


class PackedInt8Linear:
    """Linear layer equivalent to `ConcatenatedLinear`, but for int8 weights."""

    def __init__(self, modules: Sequence[Int8Linear], scales: Sequence[float]) -> None:
        is_unchanged = len(modules) == 1 and scales[0] == 1.0
        self._linear = modules[0] if is_unchanged else Int8Linear.concatenate(modules, scales)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear.forward(x)

    def forward_activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply the layer and the activation."""
        return activate(self._linear.forward(x), activation)

    def write_to(self, x: Tensor, out: Tensor) -> None:
        """Write the result to `out`."""
        (y, scale), bias = self._linear.matmul_without_row_scale_or_bias(x), self._linear.bias
        if scale is None or bias is None:
            out.copy_(y if scale is None else y.mul_(scale))
            if bias is not None:
                out.add_(bias)
        else:
            torch.addcmul(bias, y, scale, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the result to `residual` in place."""
        y, scale = self._linear.matmul_without_row_scale_or_bias(x)
        if scale is None:
            residual.add_(y)
        else:
            residual.addcmul_(y, scale)
        if self._linear.bias is not None:
            residual.add_(self._linear.bias)


@dataclass(frozen=True)
class _PrepackedLinearEntry:
    """A packed linear layer, with the versions of the weights from which it was created."""

    versions: list[tuple[int, int]]
    linear: ConcatenatedLinear | PackedInt8Linear
    tensors: list[Tensor]
    """The original weights. Keeping a reference ensures that no other tensor is allocated at the same address."""


class PrepackedWeights:
    """Packed copies of a model's linear layers, created on first use and updated when a weight has changed.

    In-place changes through `.data` are not detected because torch does not count them as a new version.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple[nn.Module | float, ...], _PrepackedLinearEntry] = {}

    def packed_linear(
        self, *modules: nn.Linear | Unembedding | Int8Linear, first_scale: float = 1.0
    ) -> ConcatenatedLinear | PackedInt8Linear:
        """Return a packed linear layer whose output is the concatenation of the outputs of `modules`.

        The output of the first module is multiplied by `first_scale`.
        """
        entry = self._cache.get((*modules, first_scale))
        int8_modules = [int8 for module in modules if (int8 := _int8_linear_of(module)) is not None]
        float_modules = [module for module in modules if not int8_modules and not isinstance(module, Int8Linear)]
        tensors = _weights_and_biases(float_modules)
        versions = [tensor_version(tensor) for tensor in tensors]
        if entry is None or entry.versions != versions:
            scales = [first_scale, *[1.0] * (len(modules) - 1)]
            linear = PackedInt8Linear(int8_modules, scales) if int8_modules else _pack_linears(float_modules, scales)
            entry = _PrepackedLinearEntry(versions, linear, tensors=[tensor.detach() for tensor in tensors])
            self._cache[(*modules, first_scale)] = entry
        return entry.linear


def _pack_linears(modules: Sequence[nn.Linear | Unembedding], scales: Sequence[float]) -> ConcatenatedLinear:
    pairs = list(zip(modules, scales, strict=True))
    return ConcatenatedLinear(
        [_scale_tensor(module.weight, scale) for module, scale in pairs],
        [None if module.bias is None else _scale_tensor(module.bias, scale) for module, scale in pairs],
    )


def _scale_tensor(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else tensor.detach() * scale


def _weights_and_biases(modules: Sequence[nn.Linear | Unembedding]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (module.weight, module.bias) if tensor is not None]


def _int8_linear_of(module: nn.Linear | Unembedding | Int8Linear) -> Int8Linear | None:
    if isinstance(module, Int8Unembedding):
        return module.int8
    return module if isinstance(module, Int8Linear) else None
