"""Training objectives: the interface between batches, models and the trainer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qkv.choices import Precision
from qkv.errors import ConfigError
from qkv.training.losses import LossSum


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
