"""Low-rank adaptation (LoRA) of attention projections. See arXiv:2106.09685."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkv.errors import ConfigError
from qkv.nn import Attention


class LoRAParametrization(nn.Module):
    """A parametrization that returns W + up·down, where the update has rank r.

    `up` is initialized to zero so that the initial model is unchanged.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        n_out, n_in = weight.shape
        if rank > min(n_out, n_in):
            raise ConfigError(
                f"lora_rank must be at most {min(n_out, n_in)}, the smaller side of the weight matrix, got {rank}"
            )
        self.down = nn.Parameter(torch.empty(rank, n_in).normal_(std=n_in**-0.5, generator=generator))
        self.up = nn.Parameter(torch.zeros(n_out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def freeze_and_add_attention_lora(model: nn.Module, *, rank: int, seed: int) -> None:
    """Freeze the model and add LoRA to the query, key, value and output projections of every attention module."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(requires_grad=False)
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
            if isinstance(matrix, nn.Linear):
                device = matrix.weight.device
                low_rank = LoRAParametrization(matrix.weight, rank, generator).to(device)
                parametrize.register_parametrization(matrix, "weight", low_rank)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model weights under their original names, with the LoRA updates merged in."""
    merged: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module_name, _, suffix = name.partition(".parametrizations.")
        if not suffix:
            merged[name] = parameter
        elif suffix.endswith(".original"):
            weight = suffix.removesuffix(".original")
            merged[f"{module_name}.{weight}"] = getattr(model.get_submodule(module_name), weight)
    return merged
