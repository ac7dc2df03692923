"""The random weights a new model starts from, a pure function of the seed."""

import torch
from torch import nn

from qkv.nn.embedding import TokenEmbedding, Unembedding
from qkv.nn.patches import PatchEmbedding

_FILLED = (nn.Linear, nn.Embedding, TokenEmbedding, PatchEmbedding, Unembedding, nn.GRU, nn.LSTM)


def initialise(model: nn.Module, *, std: float, n_residual_writes: int = 1, seed: int = 0) -> None:
    """Matrices normal with `std`, biases 0, norms 1.

    What writes to the residual stream is drawn narrower, by √n_residual_writes, so that the stream's size does
    not grow with depth (GPT-2). A model on the meta device is left as it is.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for name, part in model.named_modules():
        if isinstance(part, _FILLED):
            is_write = name.endswith((".output", ".contract"))
            spread = std / n_residual_writes**0.5 if is_write else std
            for own_name, parameter in part.named_parameters(recurse=False):
                if id(parameter) not in done:
                    _fill(own_name, parameter, spread, generator)
                    done.add(id(parameter))


def _fill(name: str, parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        if name.startswith("bias"):
            parameter.zero_()
        else:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(std=std, generator=generator)
            parameter.copy_(drawn)
