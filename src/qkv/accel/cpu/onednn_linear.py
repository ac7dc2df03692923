"""Linear layers that use oneDNN for training on CPUs.

For float32, oneDNN is about 10 % faster than the MKL kernels that torch uses by default on AMD CPUs, but the first call
with a new shape takes half a millisecond longer. oneDNN is therefore used only for GPTs, whose batches all have the
same shape.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from qkv.accel.cpu.prepacked_weights import MIN_ONEDNN_SIZE
from qkv.config import TrainingConfig
from qkv.models import GPT
from qkv.nn import Unembedding
from qkv.training.objectives import LossOutput, Objective, uses_bfloat16


@contextmanager
def override_forward(modules, create_forward):
    try:
        for module in modules:
            module.__dict__["forward"] = create_forward(module)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def use_onednn_if_supported(model: nn.Module, objective: Objective, config: TrainingConfig) -> Objective:
    """Return the objective with oneDNN matmuls if they are supported, and the unchanged objective otherwise.

    The results differ from those of torch's own matmuls only by rounding.
    """
    parameters = list(model.parameters())
    # With activation checkpointing, the backward pass recomputes activations after the original layers have been
    # restored. The default matmuls and oneDNN save different tensors, and torch.utils.checkpoint rejects this
    # difference.
    is_unsupported = (
        config.compile or config.activation_checkpointing or uses_bfloat16(config.precision, parameters[0].device)
    )
    if is_unsupported or not (isinstance(model, GPT) and _has_onednn() and all(map(_is_float32_on_cpu, parameters))):
        return objective
    large_layers = [
        part for part in model.modules() if _is_linear_layer(part) and part.weight.numel() >= MIN_ONEDNN_SIZE
    ]

    def onednn_objective(batch: Any) -> LossOutput:  # noqa: ANN401 - the batch type depends on the family
        with override_forward(large_layers, _onednn_forward):
            return objective(batch)

    return onednn_objective


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x·Wᵀ + b like `F.linear`."""
    return _OneDNNLinear.apply(x, weight, bias)


class _OneDNNLinear(torch.autograd.Function):
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


def _onednn_forward(layer: nn.Linear | Unembedding) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, nn.Linear):
        return lambda x: onednn_linear(x, layer.weight, layer.bias)
    return lambda x: layer.logits(onednn_linear(x if layer.scale == 1.0 else x * layer.scale, layer.weight, layer.bias))


def _is_linear_layer(layer: nn.Module) -> TypeGuard[nn.Linear | Unembedding]:
    return type(layer) is nn.Linear or isinstance(layer, Unembedding)


def _is_float32_on_cpu(parameter: Tensor) -> bool:
    return type(parameter.data) is Tensor and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
