"""Optimizers (AdamW and Muon), learning-rate schedules, weight averaging and the state that checkpoints contain."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from qkv.choices import OptimizerKind, ScheduleKind
from qkv.config import TrainingConfig
from qkv.errors import RunError, WeightsError
from qkv.training.checkpoint import full_tensor, load_checkpoint, shard_like
from qkv.training.lora import merged_weights
from qkv.weights.model_loader import load_into
from qkv.weights.name_table import NameMapping, NameTable


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of update `step` (starting at 0), which depends only on the config and the step."""
    progress = _decay_fraction_across_replans(config, step)
    is_warmed_up = step >= config.warmup_steps
    peak = config.learning_rate if is_warmed_up else config.learning_rate * (step + 1) / config.warmup_steps
    if not is_warmed_up and progress == 0:
        return peak
    minimum = config.min_lr_ratio
    match config.schedule:
        case ScheduleKind.CONSTANT:
            factor = 1.0
        case ScheduleKind.COSINE:
            factor = minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
        case ScheduleKind.LINEAR:
            factor = minimum + (1 - minimum) * (1 - progress)
        case ScheduleKind.WSD:
            remaining = (1 - progress) / config.decay_fraction
            factor = minimum + (1 - minimum) * min(1.0, remaining)
        case ScheduleKind.NOAM:
            factor = min(1.0, math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    return peak * factor


def _decay_fraction_across_replans(config: TrainingConfig, step: int) -> float:
    """Return the fraction of the decay that is complete at `step`. The decay starts after the warm-up.

    If the number of steps was changed during the run (`config.replans`), the remaining decay is spread evenly over the
    remaining steps. This also applies during the warm-up, which may be longer than the replanned run.
    """
    done, start = 0.0, config.warmup_steps
    for at, steps in (*config.replans, (step, config.steps)):
        end = min(at, step)
        done += (1 - done) * max(0, end - start) / max(1, steps - start)
        start = end
    return done


class Muon(Optimizer):
    """An optimizer that performs momentum SGD with orthogonalized updates (Muon).

    Updates are scaled by 0.2·√(larger side of the matrix) so that learning rates tuned for AdamW can be reused
    (arXiv:2502.16982). `torch.optim.Muon` always computes in bfloat16, which is many times slower than float32 on most
    CPUs. This implementation uses bfloat16 only on GPUs. Matrices of the same shape are processed in one batch, and
    lists of tensors are processed with foreach operations. Otherwise, launching many small kernels would dominate the
    time on a GPU.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        """Flag tensor that makes the step change no weights if its value is 1 (see `skip_step_if`)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            groups_by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    groups_by_shape[parameter.shape].append(parameter)
            for shape, parameters in groups_by_shape.items():
                self._update(parameters, group, scale=0.2 * max(shape) ** 0.5)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], *, scale: float) -> None:
        weights: list[Tensor] = [parameter.data for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momentum_buffers = [self._momentum_buffer(parameter) for parameter in parameters]
        torch._foreach_lerp_(momentum_buffers, gradients, 1 - group["momentum"])
        # Update the gradient in place because it is not needed afterwards and torch 2.11 has no out-of-place form for
        # DTensors.
        torch._foreach_lerp_(gradients, momentum_buffers, group["momentum"])
        # Sharded matrices are gathered, and each rank keeps its own shard of the update.
        updates = orthogonalize(torch.stack([full_tensor(gradient) for gradient in gradients])).to(parameters[0].dtype)
        decay, rate = group["lr"] * group["weight_decay"], group["lr"] * scale
        if self.found_inf is not None:
            updates, decay = updates.masked_fill(self.found_inf > 0, 0.0), decay * (1 - self.found_inf)
        if isinstance(rate, Tensor):
            updates, rate = updates * rate, 1.0
        sharded_updates = [shard_like(update, weight) for update, weight in zip(updates.unbind(), weights, strict=True)]
        torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_add_(weights, sharded_updates, alpha=-rate)

    def _momentum_buffer(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix with five steps of a quintic Newton–Schulz iteration."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        # Compute 3.4445·x + (−4.7750·gram + 2.0315·gram²)·x with fused multiply-adds. The coefficients are from Jordan
        # et al. 2024. They maximize the slope at 0 while keeping singular values near 1.
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if is_tall else x


def build_optimizers(model: nn.Module, config: TrainingConfig, *, capturable: bool = False) -> list[Optimizer]:
    """Create AdamW for all parameters, or Muon for the weight matrices of the blocks and AdamW for the rest.

    Weight decay applies only to matrices. If `capturable` is True, the learning rates are stored in tensors on the
    device so that a captured CUDA graph reads their current values.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_muon = config.optimizer is OptimizerKind.MUON
    block_matrices = [parameter for name, parameter in named if is_muon and parameter.ndim == 2 and "blocks." in name]
    muon_ids = {id(parameter) for parameter in block_matrices}
    scale = _layer_lr_factors([name for name, _ in named], config.layer_decay)
    grouped: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        if id(parameter) not in muon_ids:
            grouped[scale[name], parameter.ndim >= 2].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if is_matrix else 0.0, "scale": factor}
        for (factor, is_matrix), parameters in grouped.items()
    ]
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(AdamW(groups, lr=rate, betas=betas, fused=True, capturable=capturable))
    if block_matrices:
        optimizers.append(Muon(block_matrices, lr=rate, momentum=0.95, weight_decay=config.weight_decay))
    for group in [group for optimizer in optimizers for group in optimizer.param_groups if capturable]:
        group["lr"] = torch.full((), rate, device=group["params"][0].device)
    return optimizers


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group to `rate`, scaled by the group's layer-wise factor."""
    for group in optimizer.param_groups:
        scaled_rate = rate * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled_rate)
        else:
            group["lr"] = scaled_rate


def skip_step_if(found_nonfinite: Float[Tensor, ""], optimizer: Optimizer) -> None:
    """Make the next optimizer step a no-op if `found_nonfinite` is 1 when the device executes the step."""
    optimizer.found_inf = found_nonfinite  # type: ignore[attr-defined]  # used by torch's fused AdamW for gradient scaling


def clip_gradients(
    optimizer: Optimizer, norm: Float[Tensor, ""], limit: float, *, fuse_into_step: bool = False
) -> None:
    """Scale the gradients so that their global norm is at most `limit`.

    If `fuse_into_step` is True, AdamW scales the gradients in its update kernel, which saves one pass over them. The
    results differ by rounding.
    """
    if fuse_into_step and isinstance(optimizer, AdamW):
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1)  # type: ignore[attr-defined]  # see `skip_step_if`
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)


def _layer_lr_factors(names: list[str], decay: float | None) -> dict[str, float]:
    """Return the learning-rate factor of each weight: decay^(number of layers above it).

    The heads are above all layers, and the embeddings are below all layers.
    """
    if decay is None:
        return dict.fromkeys(names, 1.0)
    layer = {name: int(match[1]) + 1 for name in names if (match := re.search(r"(?:^|\.)blocks\.(\d+)\.", name))}
    top = max(layer.values(), default=0) + 1
    layer |= {name: 0 if name.startswith("embedding.") else top for name in names if name not in layer}
    return {name: decay ** (top - layer[name]) for name in names}


def optimizer_state_tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Return the optimizer state for a checkpoint, with keys of the form `parameter name/state name`."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for state_name, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{state_name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_state(model: nn.Module, optimizers: list[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Restore the state returned by `optimizer_state_tensors`."""
    parameters = dict(model.named_parameters())
    optimizer_of = {
        id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    for key, value in tensors.items():
        name, _, state_name = key.rpartition("/")
        if name not in parameters or state_name not in _state_names(optimizer_of.get(id(parameters[name]))):
            raise RunError(
                f"the checkpoint contains optimizer state '{key}', which the optimizer of the recipe does not use; was "
                "the recipe changed?"
            )
        parameter = parameters[name]
        optimizer_of[id(parameter)].state[parameter][state_name] = shard_like(value.to(parameter.device), parameter)


def _state_names(optimizer: Optimizer | None) -> tuple[str, ...]:
    match optimizer:
        case Muon():
            return ("momentum_buffer",)
        case AdamW():
            return ("step", "exp_avg", "exp_avg_sq")
        case _:
            return ()


class EMA:
    """An exponential moving average of the model weights: average ← decay·average + (1 − decay)·weights.

    The average is updated after every optimizer step. At step t, the decay is at most (1 + t)/(10 + t), which quickly
    removes the influence of the random initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the current model weights after optimizer step `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        # A foreach operation updates all tensors in a few kernels. On a GPU, the launches would dominate if each tensor
        # were updated separately.
        current: list[Tensor] = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)

    @contextmanager
    def apply_to_model(self) -> Iterator[None]:
        """Replace the model weights with the averaged weights while the context is active."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the model weights and the averaged weights in place."""
        for name, average in self.weights.items():
            parameter = self._parameters[name]
            raw_weight = parameter.clone()
            parameter.copy_(average)
            average.copy_(raw_weight)


@dataclass(frozen=True)
class TrainingState:
    """The state that training modifies: model weights, optimizer state and EMA weights."""

    model: nn.Module
    optimizers: list[Optimizer]
    ema: EMA | None
    is_lora: bool

    def tensors_by_checkpoint_file(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors for each checkpoint file.

        model.safetensors contains the weights for inference. resume.safetensors contains the optimizer state and, if
        they differ from the weights for inference (EMA or LoRA), the raw training weights.
        """
        resume = {f"optimizer/{name}": t for name, t in optimizer_state_tensors(self.model, self.optimizers).items()}
        if self.ema is None and not self.is_lora:
            return {"model.safetensors": dict(self.model.named_parameters()), "resume.safetensors": resume}
        resume |= {f"weights/{name}": parameter for name, parameter in self.model.named_parameters()}
        weights = merged_weights(self.model) if self.ema is None else self.ema.weights
        return {"model.safetensors": weights, "resume.safetensors": resume}

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Restore the training state from a checkpoint folder."""
        parameters = dict(self.model.named_parameters())
        weights, resume = load_checkpoint(folder, parameters)
        raw_weights = {key.removeprefix("weights/"): t for key, t in resume.items() if key.startswith("weights/")}
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        try:
            tensors = {name: shard_like(t, parameters.get(name, t)) for name, t in (raw_weights or weights).items()}
            load_into(
                self.model, tensors, NameTable(mappings=[NameMapping(name, (name,)) for name in names]), max_listed=2
            )
        except WeightsError as error:
            raise RunError(
                f"{folder}: the checkpoint does not match the model; was the recipe changed? {error}"
            ) from None
        if self.ema is not None:
            for name, average in self.ema.weights.items():
                average.copy_(shard_like(weights[name], average))
        optimizer_state = {
            key.removeprefix("optimizer/"): t for key, t in resume.items() if key.startswith("optimizer/")
        }
        load_optimizer_state(self.model, self.optimizers, optimizer_state)
