"""Locate the first tensor with a NaN or infinite value."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from qkv.training.sharded_tensors import to_local


def describe_nonfinite_weight(model: nn.Module) -> str | None:
    """Return the name of the first weight that contains a NaN or infinite value, or None if all weights are finite."""
    named_parameters = list(model.named_parameters())
    finite = torch.stack([to_local(parameter.detach()).isfinite().all() for _, parameter in named_parameters]).tolist()
    return next(
        (f"weight {name}" for (name, _), is_finite in zip(named_parameters, finite, strict=True) if not is_finite), None
    )


def describe_first_nonfinite_tensor(model: nn.Module, compute_losses: Callable[[], Iterable[Tensor]]) -> str:
    """Describe the first non-finite tensor of a step: a weight, a module output, the loss or a gradient.

    The tensors are checked in the order in which a step computes them. `compute_losses` recomputes the losses of the
    step.
    """
    return (
        describe_nonfinite_weight(model)
        or _describe_first_nonfinite_output(model, compute_losses)
        or _describe_last_nonfinite_gradient(model)
        or "the gradient norm"
    )


def _describe_first_nonfinite_output(model: nn.Module, compute_losses: Callable[[], Iterable[Tensor]]) -> str | None:
    nonfinite: list[str] = []

    def check(name: str, output: object) -> None:
        if isinstance(output, tuple):
            for element in output:
                check(name, element)
            return
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        # Masked attention scores are −∞ by design.
        is_valid = output.isfinite() | (output == -torch.inf) if name.endswith(".scores") else output.isfinite()
        if not is_valid.all():
            nonfinite.append(name)

    # The forward hooks of submodules run before the hooks of the modules that contain them.
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: check(f"the output of {name}", output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            for loss in compute_losses():
                check("the loss", loss)
    finally:
        for hook in hooks:
            hook.remove()
    return nonfinite[0] if nonfinite else None


def _describe_last_nonfinite_gradient(model: nn.Module) -> str | None:
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not to_local(parameter.grad).isfinite().all():
            return f"the gradient of {name}"
    return None
