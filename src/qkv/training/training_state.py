"""Convert the training state to checkpoint tensors and back."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkv.errors import RunError, WeightsError
from qkv.training.ema import EMA
from qkv.training.lora import merged_weights
from qkv.training.optimizer import load_optimizer_state, optimizer_state_tensors
from qkv.training.run_folder import load_checkpoint
from qkv.training.sharded_tensors import shard_like
from qkv.weights.name_table import NameMapping, NameTable
from qkv.weights.state_dict import load_into


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
