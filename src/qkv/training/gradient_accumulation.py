"""Accumulate gradients over micro-batches."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qkv.training.async_metrics import StepOutput
from qkv.training.distributed import Distributed, IsCounted
from qkv.training.objectives import LossOutput
from qkv.training.sharded_tensors import full_tensor


def accumulate_gradients(
    counted_outputs: Iterable[tuple[LossOutput, IsCounted]],
    n_targets: int | Tensor,
    *,
    parameters: Sequence[nn.Parameter],
    distributed: Distributed,
) -> StepOutput:
    """Run the backward pass of every micro-batch and return the loss, gradient norm and metrics of the full batch.

    `counted_outputs` yields the loss of each micro-batch and a flag that is True if the micro-batch counts.
    Micro-batches that are repeated only to keep the ranks in step (see `Distributed.shard_with_uncounted_repeats`) do
    not count. `n_targets` is the number of targets in the full batch over all ranks. This function does not synchronize
    with the device.
    """
    loss = torch.zeros((), device=parameters[0].device)
    sums: dict[str, Tensor] = {}
    for output, counts in counted_outputs:
        # Each loss is divided by the number of targets in the full batch so that the micro-batch gradients add up to
        # the gradient of the full batch, even if micro-batches have different numbers of targets. The factor world_size
        # is needed because DDP and FSDP average gradients over ranks.
        mean_loss, weight = output.loss / n_targets, distributed.world_size * counts
        (mean_loss if weight == 1 else weight * mean_loss).backward()
        loss += mean_loss.detach() if counts else 0.0
        for name, metric in output.metrics.items():
            total_and_count = torch.stack((metric.total.detach().float(), metric.count.detach().float()))
            total_and_count = total_and_count if counts else torch.zeros_like(total_and_count)
            sums[name] = sums[name] + total_and_count if name in sums else total_and_count
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    summed = distributed.all_reduce_sum(torch.cat((loss[None], *sums.values())))
    return StepOutput(
        values=torch.cat((full_tensor(grad_norm).float()[None], summed)), grad_norm=grad_norm, metric_names=tuple(sums)
    )
