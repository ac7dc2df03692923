"""Linear layers that compute with 8-bit integers.

Weights are quantized once, and activations are quantized at every call with FBGEMM on x86. FBGEMM quantizes an entire
activation tensor with a single scale and 7 bits (with 8 bits, CPUs without VNNI would saturate), so a row with large
values would leave no precision for the other rows. Each row is therefore divided by its maximum first. The result for
a row still depends slightly on the other rows.
"""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from qkv.accel.swap import share_attributes
from qkv.errors import InputError
from qkv.models import Model, RNNSeq2Seq
from qkv.nn import Unembedding
from qkv.tensors import Logits
from qkv.weights.checkpoint_folder import quantize_rows

MIN_ROW_MAX = 1e-30
"""Lower bound for the maximum of a row, which prevents a division by zero in rows of zeros."""


class Int8Linear(nn.Module):
    """Linear layer x·Wᵀ + b, where W is stored as integers from −127 to 127 with one scale per row.

    The layer is for inference only. It cannot be trained, saved or moved to another device.
    """

    def __init__(
        self, int_weight: Int8[Tensor, "out in"], scale: Float[Tensor, " out"], bias: Float[Tensor, " out"] | None
    ) -> None:
        super().__init__()
        check_int8_supported()
        safe_scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros has scale 0
        zero_points = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():
            # PyTorch has deprecated quantized tensors, but FBGEMM does not accept weights in any other form.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            weight = torch._make_per_channel_quantized_tensor(int_weight, safe_scale, zero_points, 0)  # noqa: SLF001
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self.bias = None if bias is None else bias.detach()

    @classmethod
    def concatenate(cls, layers: "Sequence[Int8Linear]", output_scales: Sequence[float]) -> "Int8Linear":
        """Return a single layer that concatenates the outputs of `layers`, each multiplied by its scale."""
        weights = [torch.ops.quantized.linear_unpack(layer._packed)[0] for layer in layers]  # noqa: SLF001 - same class
        biases = [
            layer.bias * scale for layer, scale in zip(layers, output_scales, strict=True) if layer.bias is not None
        ]
        return cls(
            torch.cat([weight.int_repr() for weight in weights]),
            torch.cat(
                [
                    weight.q_per_channel_scales().float() * scale
                    for weight, scale in zip(weights, output_scales, strict=True)
                ]
            ),
            torch.cat(biases) if biases else None,
        )

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        y, row_scale = self.matmul_without_row_scale_or_bias(x)
        y = y if row_scale is None else y.mul_(row_scale)
        return y if self.bias is None else y.add_(self.bias)

    def matmul_without_row_scale_or_bias(
        self, x: Float[Tensor, "*rows in"]
    ) -> tuple[Float[Tensor, "*rows out"], Float[Tensor, "*rows 1"] | None]:
        """Return x·Wᵀ without row scales and bias, and the row scales (`None` if no scaling is needed)."""
        matmul = torch.ops.quantized.linear_dynamic.default
        if x.numel() == x.shape[-1]:
            return matmul(x.contiguous(), self._packed, True), None
        row_max = x.abs().amax(-1, keepdim=True).clamp_min_(MIN_ROW_MAX)
        return matmul(x / row_max, self._packed, True), row_max


class Int8Unembedding(Unembedding):
    """Unembedding that computes with 8-bit integers. The token embedding keeps the original weights."""

    int8: Int8Linear

    def forward(self, x: Float[Tensor, "batch position d_model"]) -> Logits:
        return self.logits(self.int8(x * self.scale if self.scale != 1.0 else x))


def quantize_linears_to_int8(model: Model) -> None:
    """Replace all linear layers of a model with int8 layers, in place.

    The token embedding, norms and biases are unchanged. Weights that were loaded from an int8 file are quantized to
    exactly the stored values.
    """
    if isinstance(model, RNNSeq2Seq):
        raise InputError("int8 inference is only supported for Transformers, but this model is an RNN")
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in children:
        if type(child) is nn.Linear:
            setattr(parent, name, _quantize_linear(child))
        elif type(child) is Unembedding:
            replacement = share_attributes(child, Int8Unembedding)
            replacement.int8 = _quantize_linear(child)
            setattr(parent, name, replacement)


def _quantize_linear(linear: nn.Linear | Unembedding) -> Int8Linear:
    return Int8Linear(*quantize_rows(linear.weight.detach().float()), linear.bias)


def check_int8_supported() -> None:
    """Raise `InputError` if this build of PyTorch has no FBGEMM int8 matmul."""
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "fbgemm"):
        raise InputError(
            f"int8 inference requires FBGEMM, which PyTorch provides on x86 CPUs with AVX2; "
            f"the quantized engine on this machine is {engine!r}"
        )
