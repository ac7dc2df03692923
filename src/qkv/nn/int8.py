"""A linear map computed in 8-bit whole numbers: the weights once for all, what they multiply at each call.

FBGEMM's product on x86. It rounds all that it is given to 7 bits of one range (with 8, CPUs without VNNI would cut off
sums), so that one large row would leave nothing of the others; each row is therefore brought to the same size before.
What a row gets still depends a little on the rows beside it.
"""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from qkv.errors import InputError

LEAST = 1e-30
"""In the place of the size of a row of zeros."""


class Int8Linear(nn.Module):
    """x·Wᵀ + b, W being whole numbers from −127 to 127, times a scale a row. It cannot be trained, saved or moved."""

    def __init__(
        self, whole: Int8[Tensor, "out in"], scale: Float[Tensor, " out"], bias: Float[Tensor, " out"] | None
    ) -> None:
        super().__init__()
        check_int8()
        safe = torch.where(scale > 0, scale, 1.0)  # a row of zeros
        zero = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():
            # torch calls its quantized tensors deprecated, but FBGEMM's product takes its weights as nothing else.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            weight = torch._make_per_channel_quantized_tensor(whole, safe, zero, 0)  # noqa: SLF001
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self.bias = None if bias is None else bias.detach()

    @classmethod
    def side_by_side(cls, parts: "Sequence[Int8Linear]", scales: Sequence[float]) -> "Int8Linear":
        """One map that gives the results of all, each times its scale, one after another."""
        weights = [torch.ops.quantized.linear_unpack(part._packed)[0] for part in parts]  # noqa: SLF001 - its own class
        biases = [part.bias * scale for part, scale in zip(parts, scales, strict=True) if part.bias is not None]
        return cls(
            torch.cat([weight.int_repr() for weight in weights]),
            torch.cat(
                [weight.q_per_channel_scales().float() * scale for weight, scale in zip(weights, scales, strict=True)]
            ),
            torch.cat(biases) if biases else None,
        )

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        y, size = self.raw(x)
        y = y if size is None else y.mul_(size)
        return y if self.bias is None else y.add_(self.bias)

    def raw(self, x: Float[Tensor, "*rows in"]) -> tuple[Float[Tensor, "*rows out"], Float[Tensor, "*rows 1"] | None]:
        """x·Wᵀ as a product and the sizes of the rows, by which it is still to be multiplied; None: by nothing."""
        multiply = torch.ops.quantized.linear_dynamic.default
        if x.numel() == x.shape[-1]:
            return multiply(x.contiguous(), self._packed, True), None
        size = x.abs().amax(-1, keepdim=True).clamp_min_(LEAST)
        return multiply(x / size, self._packed, True), size


def check_int8() -> None:
    """Refuse a machine whose torch has no such product."""
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "fbgemm"):
        raise InputError(
            f"int8 arithmetic needs FBGEMM, which torch has on x86 with AVX2; here its engine is {engine!r}"
        )
