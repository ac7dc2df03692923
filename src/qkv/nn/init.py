"""Initialize weights with random values that depend only on the seed."""

import torch
from torch import nn

from qkv.nn.embedding import PatchProjection, TokenEmbedding, Unembedding

_INITIALIZED_MODULES = (nn.Linear, nn.Embedding, TokenEmbedding, PatchProjection, Unembedding, nn.GRU, nn.LSTM)


def init_weights(model: nn.Module, *, std: float, n_residual_writes: int = 1, seed: int = 0) -> None:
    """Initialize matrices from a normal distribution with standard deviation `std`, and biases to 0.

    Projections that write to the residual stream use std / √n_residual_writes so that the magnitude of the stream does
    not grow with depth (GPT-2). Norms keep their initial weight of 1. A model on the meta device is left unchanged.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    generator = torch.Generator().manual_seed(seed)
    initialized: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, _INITIALIZED_MODULES):
            is_residual_write = name.endswith((".out_proj", ".down_proj"))
            module_std = std / n_residual_writes**0.5 if is_residual_write else std
            for parameter_name, parameter in module.named_parameters(recurse=False):
                # Tied parameters belong to several modules. The first module in module order determines their
                # initialization.
                if id(parameter) in initialized:
                    continue
                initialized.add(id(parameter))
                with torch.no_grad():
                    if parameter_name.startswith("bias"):
                        parameter.zero_()
                    else:
                        # Drawn on the CPU and then copied so that the weights do not depend on the device.
                        drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                        parameter.copy_(drawn.normal_(std=module_std, generator=generator))
