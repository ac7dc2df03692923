"""What a model is trained to do: a batch in, the summed loss out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qkv.choices import Precision
from qkv.errors import ConfigError
from qkv.training.losses import Summed


@runtime_checkable
class TrainingBatch(Protocol):
    """A batch of any family: the trainer splits it and counts its targets, its own objective reads it."""

    @property
    def n_targets(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    def split(self, n_rows: int) -> Iterator["TrainingBatch"]: ...


@dataclass(frozen=True)
class Measure:
    """Something worth knowing besides the loss, as a sum and a count: right answers of all answers, say."""

    total: Summed
    count: Tensor


@dataclass(frozen=True)
class Outcome:
    """What an objective says of a batch. Everything stays on the device: the trainer asks for numbers once a step."""

    loss: Summed
    """The sum over the batch's targets; the trainer divides by how many the whole batch has."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """By the name they are logged under; shown as total/count."""


Objective = Callable[[Any], Outcome]
"""From one family's batch to −Σ log p of its targets."""
Sent = tuple[Tensor | None, ...]
"""All that a step reads of a batch, on the device."""


@dataclass(frozen=True)
class Halves:
    """An objective in two, so that the second can be recorded: it sees tensors on the device alone."""

    send: Callable[[Any], Sent]
    """Refuses what is no batch of this model's while it is on the CPU; then it is sent."""
    judge: Callable[..., Outcome]
    """Takes what was sent."""

    def __call__(self, batch: Any) -> Outcome:  # noqa: ANN401 - one family's batch
        return self.judge(*self.send(batch))


def is_mixed(precision: Precision, device: torch.device) -> bool:
    """Whether products run in bfloat16."""
    return precision is Precision.BF16 or (precision is Precision.AUTO and device.type == "cuda")


def autocasting(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A maker of contexts in which products run in that precision."""
    if not is_mixed(precision, device):
        return nullcontext
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 - there is no public question
        raise ConfigError("precision='bf16' on this CPU would be about 60 times slower than fp32; leave it at 'auto'")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
