"""How wrong the predictions are: summed cross-entropy, without ever holding all logits."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.nn import Unembedding

NO_TARGET = -100
"""At positions with this target nothing is predicted."""
MULTIPLE = 64
"""Of the vocabulary, in a GPU's products: rows of 50,257 would be out of its step."""

Summed = Float[Tensor, ""]


def cross_entropy_sum(
    logits: Float[Tensor, "*place vocabulary"], targets: Int[Tensor, "*place"], *, smoothing: float = 0.0
) -> Summed:
    """−Σ log p(target), in float32; the caller divides by the number of targets it knows of.

    With `smoothing` ε the aim is 1 − ε for the target and ε spread evenly over all words (arXiv:1512.00567).
    """
    flat, wanted = logits.flatten(0, -2).float(), targets.flatten()
    return F.cross_entropy(flat, wanted, ignore_index=NO_TARGET, reduction="sum", label_smoothing=smoothing)


def unembedded_loss_sum(
    unembedding: Unembedding,
    states: Float[Tensor, "batch position d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk: int | None = None,
    smoothing: float = 0.0,
) -> Summed:
    """The same as `cross_entropy_sum(unembedding(states), targets)`, for `chunk` positions at a time if given."""
    has_kernel = states.is_cuda and torch.compiler.is_compiling()
    if chunk is None and not has_kernel:
        return cross_entropy_sum(unembedding(states), targets, smoothing=smoothing)
    flat = states.flatten(0, 1) * unembedding.scale
    road = _ByKernel if has_kernel else _Chunked
    return road.apply(flat, unembedding.weight, unembedding.bias, targets.flatten(), chunk or len(flat), smoothing)


class _Chunked(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk, so no chunk's logits outlive it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        smoothing: float,
    ) -> Tensor:
        # Without gradients wanted (evaluation) only the loss is made.
        wants_gradient = any(ctx.needs_input_grad[:3])
        dtype = _product_dtype(states)
        used = weight.to(dtype)
        total = states.new_zeros((), dtype=torch.float32)
        state_gradient = torch.empty_like(states) if wants_gradient else None
        weight_gradient = torch.zeros_like(weight) if wants_gradient else None
        bias_gradient = torch.zeros_like(bias) if wants_gradient and bias is not None else None
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            x, wanted = states[part].to(dtype), targets[part]
            logits = (x @ used.T).float()
            if bias is not None:
                logits += bias
            log_p = logits.log_softmax(-1)
            is_wanted = wanted != NO_TARGET
            at = wanted.clamp(min=0)[:, None]
            total -= (1 - smoothing) * (log_p.gather(1, at).squeeze(1) * is_wanted).sum()
            if smoothing:
                total -= smoothing * (log_p.mean(1) * is_wanted).sum()
            if state_gradient is None or weight_gradient is None:
                continue
            error = log_p.exp_()
            error -= smoothing / error.shape[1]
            error.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=error.dtype))
            error *= is_wanted[:, None]
            state_gradient[part] = error.to(dtype) @ used
            weight_gradient += (error.to(dtype).T @ x).to(weight.dtype)
            if bias_gradient is not None:
                bias_gradient += error.sum(0)
        ctx.gradients = (state_gradient, weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        # In place, and let go: a second set, as large as the vocabulary's table, would stay until the step's end.
        gradients, ctx.gradients = ctx.gradients, ()
        return (*(None if part is None else part.mul_(upstream) for part in gradients), None, None, None)


class _ByKernel(torch.autograd.Function):
    """The same in what is compiled for a GPU: one kernel makes a chunk's losses, and errors in the logits' place."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        smoothing: float,
    ) -> Tensor:
        from qkv.training.loss_kernel import errors_

        wants_gradient, n_words, dtype = any(ctx.needs_input_grad[:3]), len(weight), _product_dtype(states)
        n_more = -n_words % MULTIPLE
        used = F.pad(weight.to(dtype), (0, 0, 0, n_more))
        added = None if bias is None else F.pad(bias.to(dtype), (0, n_more))
        losses, made = [], []
        for x, wanted in zip(states.to(dtype).split(chunk), targets.split(chunk), strict=True):
            logits = F.linear(x, used, added)
            losses.append(errors_(logits, wanted, n_words, smoothing, wants_errors=wants_gradient).sum())
            if wants_gradient:
                weight_part = (logits.T @ x)[:n_words].to(weight.dtype)
                bias_part = None if bias is None else logits[:, :n_words].sum(0, dtype=bias.dtype)
                made.append(((logits @ used).to(states.dtype), weight_part, bias_part))
        if wants_gradient:
            of_states, of_weight, of_bias = zip(*made, strict=True)
            ctx.gradients = (torch.cat(of_states), sum(of_weight), None if bias is None else sum(of_bias))
        return torch.stack(losses).sum()

    backward = _Chunked.backward  # type: ignore[assignment]


def _product_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
