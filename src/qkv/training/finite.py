"""Which tensor was the first that is not a number."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from qkv.training.pieces import own_piece


def bad_weight(model: nn.Module) -> str | None:
    """The first weight with a value that is NaN or infinite."""
    named = list(model.named_parameters())
    finite = torch.stack([own_piece(parameter.detach()).isfinite().all() for _, parameter in named]).tolist()
    return next((f"weight {name}" for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite), None)


def first_bad(model: nn.Module, losses: Callable[[], Iterable[Tensor]]) -> str:
    """In the order a step makes them: weights, outputs of the parts, the loss, gradients from the top down.

    `losses` computes the losses of the step once more, in the same way.
    """
    return bad_weight(model) or _bad_output(model, losses) or _bad_gradient(model) or "the gradients' norm"


def _bad_output(model: nn.Module, losses: Callable[[], Iterable[Tensor]]) -> str | None:
    found: list[str] = []

    def look(name: str, output: object) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        # Where a mask forbids to look, a score is −∞, and rightly so.
        is_good = output.isfinite() | (output == -torch.inf) if name.endswith(".scores") else output.isfinite()
        if not is_good.all():
            found.append(name)

    # Parts come before the wholes they are in, as their outputs do.
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output, name=name: look(f"the output of {name}", output))
        for name, part in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            for loss in losses():
                look("the loss", loss)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _bad_gradient(model: nn.Module) -> str | None:
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not own_piece(parameter.grad).isfinite().all():
            return f"the gradient of {name}"
    return None
