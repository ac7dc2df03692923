"""Training a little instead of everything: two thin matrices beside each attention matrix. arXiv:2106.09685."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkv.errors import ConfigError
from qkv.nn import Attention


class LowRank(nn.Module):
    """W + up·down, both of rank r; `up` starts at zero, so the model starts as it was."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        n_out, n_in = weight.shape
        if rank > min(n_out, n_in):
            raise ConfigError(f"lora_rank={rank} must not be more than the matrix's smaller side {min(n_out, n_in)}")
        self.down = nn.Parameter(torch.empty(rank, n_in).normal_(std=n_in**-0.5, generator=generator))
        self.up = nn.Parameter(torch.zeros(n_out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_lora(model: nn.Module, *, rank: int, seed: int) -> None:
    """Freeze the model and put a `LowRank` beside every query, key, value and output matrix of its attentions."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(requires_grad=False)
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        for matrix in (attention.query, attention.key, attention.value, attention.output):
            if isinstance(matrix, nn.Linear):
                device = matrix.weight.device
                low_rank = LowRank(matrix.weight, rank, generator).to(device)
                parametrize.register_parametrization(matrix, "weight", low_rank)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under their plain names, each tensor once, what LoRA added multiplied in."""
    merged: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, rest = name.partition(".parametrizations.")
        if not rest:
            merged[name] = parameter
        elif rest.endswith(".original"):
            weight = rest.removesuffix(".original")
            merged[f"{owner}.{weight}"] = getattr(model.get_submodule(owner), weight)
    return merged
