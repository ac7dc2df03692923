"""Training objectives, which map a batch to its loss and metrics, and the cross-entropy losses that they use."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Precision
from qkv.errors import ConfigError
from qkv.nn import Unembedding
from qkv.tensors import IGNORE_INDEX

LossSum = Float[Tensor, ""]


def cross_entropy_sum(
    logits: Float[Tensor, "*position vocabulary"], targets: Int[Tensor, "*position"], *, smoothing: float = 0.0
) -> LossSum:
    """Return −Σ log p(target) in float32, ignoring targets equal to IGNORE_INDEX.

    With label smoothing ε, the target distribution assigns 1 − ε to the target and spreads ε evenly over the vocabulary
    (arXiv:1512.00567).
    """
    flat, chunk_targets = logits.flatten(0, -2).float(), targets.flatten()
    return F.cross_entropy(flat, chunk_targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing)


def chunked_loss_sum(
    unembedding: Unembedding,
    states: Float[Tensor, "batch position d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk: int | None = None,
    smoothing: float = 0.0,
) -> LossSum:
    """Compute `cross_entropy_sum(unembedding(states), targets)` with logits for at most `chunk` positions at a time."""
    if chunk is None:
        return cross_entropy_sum(unembedding(states), targets, smoothing=smoothing)
    flat = states.flatten(0, 1) * unembedding.scale
    return _ChunkedLossSum.apply(flat, unembedding.weight, unembedding.bias, targets.flatten(), chunk, smoothing)


class _ChunkedLossSum(torch.autograd.Function):
    """Autograd function that computes the gradients in the forward pass, one chunk at a time.

    Only one chunk of logits is in memory at a time.
    """

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
        # Evaluation requires only the loss, not the gradients.
        needs_gradient = any(ctx.needs_input_grad[:3])
        dtype = _matmul_dtype(states)
        cast_weight = weight.to(dtype)
        total = states.new_zeros((), dtype=torch.float32)
        state_gradient = torch.empty_like(states) if needs_gradient else None
        weight_gradient = torch.zeros_like(weight) if needs_gradient else None
        bias_gradient = torch.zeros_like(bias) if needs_gradient and bias is not None else None
        for start in range(0, len(states), chunk):
            rows = slice(start, start + chunk)
            x, chunk_targets = states[rows].to(dtype), targets[rows]
            logits = (x @ cast_weight.T).float()
            if bias is not None:
                logits += bias
            log_p = logits.log_softmax(-1)
            has_target = chunk_targets != IGNORE_INDEX
            target_index = chunk_targets.clamp(min=0)[:, None]
            total -= (1 - smoothing) * (log_p.gather(1, target_index).squeeze(1) * has_target).sum()
            if smoothing:
                total -= smoothing * (log_p.mean(1) * has_target).sum()
            if state_gradient is None or weight_gradient is None:
                continue
            logit_gradient = log_p.exp_()
            logit_gradient -= smoothing / logit_gradient.shape[1]
            logit_gradient.scatter_add_(
                1, target_index, torch.full_like(target_index, smoothing - 1, dtype=logit_gradient.dtype)
            )
            logit_gradient *= has_target[:, None]
            state_gradient[rows] = logit_gradient.to(dtype) @ cast_weight
            weight_gradient += (logit_gradient.to(dtype).T @ x).to(weight.dtype)
            if bias_gradient is not None:
                bias_gradient += logit_gradient.sum(0)
        ctx.gradients = (state_gradient, weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        # Scale in place and release the saved gradients. Otherwise, a second set of gradients, as large as the
        # embedding matrix, would stay in memory until the end of the step.
        gradients, ctx.gradients = ctx.gradients, ()
        return (*(None if gradient is None else gradient.mul_(grad_output) for gradient in gradients), None, None, None)


def _matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@runtime_checkable
class TrainingBatch(Protocol):
    """A batch for any model family.

    The trainer only splits the batch and counts targets. The objective reads its tensors.
    """

    @property
    def n_targets(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    def split(self, n_rows: int) -> Iterator["TrainingBatch"]: ...


@dataclass(frozen=True)
class Metric:
    """A metric that is logged in addition to the loss.

    The metric is stored as a sum and a count so that batches can be combined exactly. For accuracy, `total` is the
    number of correct predictions and `count` is the number of predictions.
    """

    total: LossSum
    count: Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss and metrics of one batch, as tensors on the device.

    The trainer copies them to the host once per step.
    """

    loss: LossSum
    """Sum of the losses over all targets in this micro-batch. The trainer divides it by the number of targets in the
    full batch."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics keyed by their names in metrics.jsonl. The logged value is total/count."""


Objective = Callable[[Any], LossOutput]
"""A function that maps a batch of the model's family to its loss, −Σ log p(target), and its metrics."""
DeviceInputs = tuple[Tensor | None, ...]
"""The tensors of a batch, on the device, that a step reads."""


@dataclass(frozen=True)
class SplitObjective:
    """An objective split into a host part and a device part. The device part can be captured in a CUDA graph."""

    to_device: Callable[[Any], DeviceInputs]
    """Validate the batch on the CPU and copy its tensors to the device."""
    loss: Callable[..., LossOutput]
    """Compute the loss from the tensors returned by `to_device`, without reading any value back to the host."""

    def __call__(self, batch: Any) -> LossOutput:  # noqa: ANN401 - the batch type depends on the family
        return self.loss(*self.to_device(batch))


def uses_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Return True if matmuls run in bfloat16. `auto` selects bfloat16 only on CUDA devices."""
    return precision is Precision.BF16 or (precision is Precision.AUTO and device.type == "cuda")


def autocast_factory(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that creates an autocast context for this precision, or a null context for float32."""
    if not uses_bfloat16(precision, device):
        return nullcontext
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 - torch has no public API for this check
        raise ConfigError(
            "precision='bf16' requires a CPU with AVX512-BF16, because it is otherwise about 60 times slower than "
            "fp32; use precision='auto'"
        )
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
