"""What do a step's parts come to? Gradients added up in the model, and the step's numbers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qkv.training.objectives import Outcome
from qkv.training.pieces import whole
from qkv.training.ranks import Ranks
from qkv.training.reading import Made


def accumulate_gradients(
    outcomes: Iterable[tuple[Outcome, bool]], n_targets: int | Tensor, *, parameters: Sequence[nn.Parameter],
    ranks: Ranks,
) -> Made:  # fmt: skip
    """`outcomes`: of each part, and whether it counts; `n_targets`: of the whole batch. No GPU is waited for."""
    loss = torch.zeros((), device=parameters[0].device)
    sums: dict[str, Tensor] = {}
    for outcome, counts in outcomes:
        # Weighted by real target counts: the parts' gradients add up to the whole batch's. Ranks average theirs.
        share, weight = outcome.loss / n_targets, ranks.world * counts
        (share if weight == 1 else weight * share).backward()
        loss += share.detach() if counts else 0.0
        for name, measure in outcome.measures.items():
            both = torch.stack((measure.total.detach().float(), measure.count.detach().float()))
            both = both if counts else torch.zeros_like(both)
            sums[name] = sums[name] + both if name in sums else both
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    together = ranks.summed(torch.cat((loss[None], *sums.values())))
    return Made(numbers=torch.cat((whole(norm).float()[None], together)), norm=norm, names=tuple(sums))
