"""What a model is trained to do: a batch in, the summed loss out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qkv.choices import Precision
from qkv.config import TrainingConfig
from qkv.data.windows import Batch
from qkv.errors import ConfigError
from qkv.models import GPT
from qkv.nn import check_ids
from qkv.training.losses import Summed, unembedded_loss_sum


@runtime_checkable
class TrainingBatch(Protocol):
    """A batch of any family: the trainer splits it and counts its targets, its own objective reads it."""

    @property
    def n_targets(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    def split(self, n_rows: int) -> Iterator["TrainingBatch"]: ...


Objective = Callable[[Any], Summed]
"""From one family's batch to −Σ log p of its targets."""


def next_token(model: GPT, config: TrainingConfig) -> Objective:
    """At every position a distribution over what comes next; the sum of −log p of what came."""
    device, vocabulary_size = model.embedding.token.weight.device, model.config.vocabulary_size
    autocast = autocasting(config.precision, device)

    def loss(ids: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        states = model.states(ids, documents=documents)
        return unembedded_loss_sum(model.unembedding, states, targets, chunk=config.loss_chunk)

    compute = torch.compile(loss, dynamic=False) if config.compiled else loss

    def objective(batch: Batch) -> Tensor:
        # Here, where the ids are still on the CPU: a GPU would end the whole process.
        check_ids(batch.ids, vocabulary_size)
        check_ids(batch.targets.clamp(min=0), vocabulary_size)
        there = batch.to(device)
        with autocast():
            return compute(there.ids, there.targets, there.documents)

    return objective


def autocasting(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A maker of contexts in which products run in that precision."""
    is_bf16 = precision is Precision.BF16 or (precision is Precision.AUTO and device.type == "cuda")
    if not is_bf16:
        return nullcontext
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 - there is no public question
        raise ConfigError("precision='bf16' on this CPU would be about 60 times slower than fp32; leave it at 'auto'")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
