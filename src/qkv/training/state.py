"""What of a run goes into a checkpoint, and how it comes back."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkv.errors import RunError, WeightsError
from qkv.training.averaging import Averaged
from qkv.training.lora import merged_weights
from qkv.training.optimizer import optimizer_tensors, restore_optimizers
from qkv.training.pieces import cut_like
from qkv.training.run import read_checkpoint
from qkv.weights.names import NameTable, Rename
from qkv.weights.tensors import fill


@dataclass(frozen=True)
class State:
    """All that changes while a model is trained."""

    model: nn.Module
    optimizers: list[Optimizer]
    averaged: Averaged | None
    is_lora: bool

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """`model`: what to use. `resume`: the optimizers' memory, and the raw weights where those are others."""
        resume = {f"optimizer/{name}": t for name, t in optimizer_tensors(self.model, self.optimizers).items()}
        if self.averaged is None and not self.is_lora:
            return {"model.safetensors": dict(self.model.named_parameters()), "resume.safetensors": resume}
        resume |= {f"weights/{name}": parameter for name, parameter in self.model.named_parameters()}
        used = merged_weights(self.model) if self.averaged is None else self.averaged.weights
        return {"model.safetensors": used, "resume.safetensors": resume}

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        parameters = dict(self.model.named_parameters())
        used, resume = read_checkpoint(folder, parameters)
        raw = {key.removeprefix("weights/"): t for key, t in resume.items() if key.startswith("weights/")}
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        try:
            given = {name: cut_like(t, parameters.get(name, t)) for name, t in (raw or used).items()}
            fill(self.model, given, NameTable(renames=[Rename(name, (name,)) for name in names]), most_faults=2)
        except WeightsError as error:
            raise RunError(f"{folder}: was the recipe changed? {error}") from None
        if self.averaged is not None:
            for name, average in self.averaged.weights.items():
                average.copy_(cut_like(used[name], average))
        memory = {key.removeprefix("optimizer/"): t for key, t in resume.items() if key.startswith("optimizer/")}
        restore_optimizers(self.model, self.optimizers, memory)
