"""Linear layers that use oneDNN for training on CPUs.

For float32, oneDNN is about 10 % faster than the MKL kernels that torch uses by default on AMD CPUs, but the first call
with a new shape takes half a millisecond longer. oneDNN is therefore used only for GPTs, whose batches all have the
same shape.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qkv.accel.swap import FindReplacement, share_attributes
from qkv.choices import Precision
from qkv.config import TrainingConfig
from qkv.models import GPT
from qkv.nn import Unembedding
from qkv.tensors import Logits

MIN_ONEDNN_SIZE = 2**17
"""Matrix size in elements from which oneDNN saves more time than the overhead of its call."""


def has_onednn() -> bool:
    """Return whether torch has the oneDNN operators that torch.compile uses."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class OneDNNLinear(nn.Linear):
    """Linear layer that multiplies with oneDNN. The results differ from those of `nn.Linear` only by rounding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return onednn_linear(input, self.weight, self.bias)


class OneDNNUnembedding(Unembedding):
    """Unembedding that multiplies with oneDNN."""

    def forward(self, x: Tensor) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(onednn_linear(x, self.weight, self.bias))


def reason_onednn_is_unsupported(model: nn.Module, config: TrainingConfig) -> str | None:
    """Return why oneDNN cannot be used to train the model with these settings, or `None` if it can."""
    conditions = {
        "requires float32 weights on a CPU": all(map(_is_float32_on_cpu, model.parameters())),
        "requires a GPT, because its batches all have the same shape": isinstance(model, GPT),
        "PyTorch was built without oneDNN": has_onednn(),
        "compile=true is not supported": not config.compile,
        "activation_checkpointing=true is not supported": not config.activation_checkpointing,
        "precision='bf16' is not supported": config.precision is not Precision.BF16,
        f"requires a weight matrix with at least {MIN_ONEDNN_SIZE:,} elements": any(
            _is_large_linear(module) for module in model.modules()
        ),
    }
    return next((reason for reason, is_met in conditions.items() if not is_met), None)


def onednn_replacement_finder(model: nn.Module) -> FindReplacement:
    """Return a function that replaces the large linear layers of a float32 GPT on a CPU, and nothing otherwise."""
    is_supported = isinstance(model, GPT) and has_onednn() and all(map(_is_float32_on_cpu, model.parameters()))

    def find_replacement(module: nn.Module) -> nn.Module | None:
        if not is_supported or not _is_large_linear(module):
            return None
        return share_attributes(module, OneDNNLinear if type(module) is nn.Linear else OneDNNUnembedding)

    return find_replacement


def _is_large_linear(module: nn.Module) -> bool:
    if type(module) is nn.Linear or type(module) is Unembedding:
        return module.weight.numel() >= MIN_ONEDNN_SIZE
    return False


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x·Wᵀ + b like `F.linear`."""
    return _OneDNNLinearFunction.apply(x, weight, bias)


class _OneDNNLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return _onednn_matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows = grad_output.flatten(0, -2)
        return (
            _onednn_matmul(grad_output, weight.t()) if needs_x else None,
            # Use torch.mm because oneDNN would first transpose both operands in memory.
            torch.mm(grad_rows.t(), x.flatten(0, -2)) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
        )


def _onednn_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # noqa: SLF001 - the operator that torch.compile uses


def _is_float32_on_cpu(parameter: Tensor) -> bool:
    return type(parameter.data) is Tensor and parameter.device.type == "cpu" and parameter.dtype == torch.float32
