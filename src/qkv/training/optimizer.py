"""Turning gradients into better weights: AdamW, and Muon for the blocks' matrices."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from qkv.choices import OptimizerKind
from qkv.config import TrainingConfig
from qkv.errors import RunError
from qkv.training.pieces import cut_like, whole


class Muon(Optimizer):
    """Momentum whose every update is made orthogonal: all directions of a matrix move equally far.

    Matrices of one shape are treated together. The update is scaled by 0.2·√(larger side), so that AdamW's
    learning rates fit (arXiv:2502.16982). torch's own Muon computes in bfloat16, many times slower than float32
    on most CPUs; this one does so on a GPU alone. Lists of tensors are updated in one call each (`_foreach_…`, which
    torch's own optimizers use): on a GPU the launches of many small kernels would cost more than the work.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        """1: no weight is changed; see `skip_where`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                self._update(parameters, group, scale=0.2 * max(shape) ** 0.5)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], *, scale: float) -> None:
        weights: list[Tensor] = [parameter.data for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        velocities = [self._velocity(parameter) for parameter in parameters]
        torch._foreach_lerp_(velocities, gradients, 1 - group["momentum"])
        # In place, for a gradient is not read again; torch 2.11 has no other form for tensors in pieces.
        torch._foreach_lerp_(gradients, velocities, group["momentum"])
        # A matrix in pieces is gathered, and each process keeps its own piece of the update.
        updates = orthogonal(torch.stack([whole(one) for one in gradients])).to(parameters[0].dtype)
        lost, rate = group["lr"] * group["weight_decay"], group["lr"] * scale
        if self.found_inf is not None:
            updates, lost = updates.masked_fill(self.found_inf > 0, 0.0), lost * (1 - self.found_inf)
        if isinstance(rate, Tensor):
            updates, rate = updates * rate, 1.0
        moves = [cut_like(update, weight) for update, weight in zip(updates.unbind(), weights, strict=True)]
        torch._foreach_mul_(weights, 1 - lost)
        torch._foreach_add_(weights, moves, alpha=-rate)

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        return state["velocity"]


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix's nearest orthogonal one, roughly: five steps of a quintic Newton–Schulz iteration."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        # 3.4445·x + (−4.7750·gram + 2.0315·gram²)·x, each product added to its term as it is made. These
        # coefficients have the steepest slope at 0 that still stays near 1: Jordan et al. 2024.
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if is_tall else x


def build_optimizers(model: nn.Module, config: TrainingConfig, *, is_recorded: bool = False) -> list[Optimizer]:
    """AdamW for all, or for what Muon leaves: it takes the blocks' matrices. Weight decay is for matrices alone.

    `is_recorded`: a GPU plays their steps back, so that it must find the learning rates in its own memory.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_muon = config.optimizer is OptimizerKind.MUON
    hidden = [parameter for name, parameter in named if is_muon and parameter.ndim == 2 and "blocks." in name]
    taken = {id(parameter) for parameter in hidden}
    scale = _layer_scales([name for name, _ in named], config.layer_decay)
    alike: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        if id(parameter) not in taken:
            alike[scale[name], parameter.ndim >= 2].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if is_matrix else 0.0, "scale": share}
        for (share, is_matrix), parameters in alike.items()
    ]
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(AdamW(groups, lr=rate, betas=betas, fused=True, capturable=is_recorded))
    if hidden:
        optimizers.append(Muon(hidden, lr=rate, momentum=0.95, weight_decay=config.weight_decay))
    for group in [group for one in optimizers for group in one.param_groups if is_recorded]:
        group["lr"] = torch.full((), rate, device=group["params"][0].device)
    return optimizers


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        own = rate * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def skip_where(is_bad: Float[Tensor, ""], optimizer: Optimizer) -> None:
    """Its next step changes no weight if that is 1 when the device comes to it: the CPU need not wait to know."""
    optimizer.found_inf = is_bad  # type: ignore[attr-defined]  # torch's fused AdamW has this from gradient scaling


def clip_gradients(optimizer: Optimizer, norm: Float[Tensor, ""], limit: float, *, on_the_way: bool = False) -> None:
    """Bring all gradients' norm down to `limit`. `on_the_way`: where the update itself can divide by a number, so that
    they are not read and written once more; what comes of it differs by rounding.
    """
    if on_the_way and isinstance(optimizer, AdamW):
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1)  # type: ignore[attr-defined]  # as `found_inf`
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)


def _layer_scales(names: list[str], decay: float | None) -> dict[str, float]:
    """What part of the learning rate each weight gets: decay^(layers above it). Heads are on top, embeddings below."""
    if decay is None:
        return dict.fromkeys(names, 1.0)
    layer = {name: int(found[1]) + 1 for name in names if (found := re.search(r"(?:^|\.)blocks\.(\d+)\.", name))}
    top = max(layer.values(), default=0) + 1
    layer |= {name: 0 if name.startswith("embedding.") else top for name in names if name not in layer}
    return {name: decay ** (top - layer[name]) for name in names}


def optimizer_tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """All that the optimizers remember, by `parameter name/what`: for a checkpoint."""
    kept = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for what, value in optimizer.state.get(parameter, {}).items():
                kept[f"{name}/{what}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return kept


def restore_optimizers(model: nn.Module, optimizers: list[Optimizer], kept: dict[str, Tensor]) -> None:
    """Bring back what `optimizer_tensors` gave."""
    parameters = dict(model.named_parameters())
    owner = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}
    for key, value in kept.items():
        name, _, what = key.rpartition("/")
        if name not in parameters or what not in _remembered(owner.get(id(parameters[name]))):
            raise RunError(f"the checkpoint's optimizer kept '{key}', this one does not: was the recipe changed?")
        parameter = parameters[name]
        owner[id(parameter)].state[parameter][what] = cut_like(value.to(parameter.device), parameter)


def _remembered(optimizer: Optimizer | None) -> tuple[str, ...]:
    match optimizer:
        case Muon():
            return ("velocity",)
        case AdamW():
            return ("step", "exp_avg", "exp_avg_sq")
        case _:
            return ()
