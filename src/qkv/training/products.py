"""Which product multiplies fastest in a training step on a CPU? oneDNN's, where one shape comes again and again.

It is a tenth faster than the product that torch itself takes for float32 (MKL's, on AMD's CPUs), and half a
millisecond slower when it meets a shape for the first time: so it is for GPTs, whose windows all have one length.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from qkv.config import TrainingConfig
from qkv.generation.packing import SMALL, multiplying
from qkv.models import GPT
from qkv.nn import Unembedding
from qkv.training.objectives import Objective, Outcome, is_mixed


def with_quick_products(model: nn.Module, objective: Objective, config: TrainingConfig) -> Objective:
    """The same objective by other products, from which torch's own differ by rounding alone; or the very same one."""
    parameters = list(model.parameters())
    # Activations are computed again in the backward pass, when this is over: by products that keep other tensors.
    is_other = config.compile or config.checkpoint_activations or is_mixed(config.precision, parameters[0].device)
    if is_other or not (isinstance(model, GPT) and _has_onednn() and all(map(_is_usual, parameters))):
        return objective
    large = [part for part in model.modules() if _is_product(part) and part.weight.numel() >= SMALL]

    def by_onednn(batch: Any) -> Outcome:  # noqa: ANN401 - one family's batch
        with multiplying(large, _forward):
            return objective(batch)

    return by_onednn


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + b, as `F.linear`."""
    return _Product.apply(x, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = given.flatten(0, -2)
        return (
            _multiply(given, weight.t()) if wants_x else None,
            # Not oneDNN: it would turn both round in memory first.
            torch.mm(rows.t(), x.flatten(0, -2)) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # noqa: SLF001 - as torch.compile does


def _forward(part: nn.Linear | Unembedding) -> Callable[[Tensor], Tensor]:
    if isinstance(part, nn.Linear):
        return lambda x: product(x, part.weight, part.bias)
    return lambda x: part.logits(product(x if part.scale == 1.0 else x * part.scale, part.weight, part.bias))


def _is_product(part: nn.Module) -> TypeGuard[nn.Linear | Unembedding]:
    return type(part) is nn.Linear or isinstance(part, Unembedding)


def _is_usual(parameter: Tensor) -> bool:
    return type(parameter.data) is Tensor and parameter.device.type == "cpu" and parameter.dtype == torch.float32


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
