"""Where a token stands, told to the model as a vector: learned, sinusoidal, or concatenated and projected."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import SinusoidStyle
from qkv.errors import ConfigError, ContextLengthError
from qkv.nn.tables import made_once
from qkv.tensors import Positions, Residual


def sinusoid(
    positions: Positions,
    d_model: int,
    style: SinusoidStyle = SinusoidStyle.INTERLEAVED,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "#batch position d_model"]:
    """sin and cos of position × 10000^(−2i/d): fixed vectors, any two of them different."""
    if d_model % 2:
        raise ConfigError(f"sinusoidal positions come in pairs: d_model={d_model} must be even")
    first = 1 if style is SinusoidStyle.INTERLEAVED_FROM_ONE else 0
    pairs = torch.arange(first, first + d_model // 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * 10000 ** (-2 * pairs / d_model)
    match style:
        case SinusoidStyle.HALVES:
            vectors = torch.cat((angles.sin(), angles.cos()), dim=-1)
        case SinusoidStyle.INTERLEAVED | SinusoidStyle.INTERLEAVED_FROM_ONE:
            vectors = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return made_once(vectors.to(dtype))


class LearnedPositions(nn.Module):
    """One vector a position, learned like a word's, added to the token's; `offset` rows stand before position 0."""

    def __init__(self, context_length: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(context_length + offset, d_model)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        n = self.table.num_embeddings - self.offset
        # Values are looked at on the CPU alone, as those of ids are; models check lengths before they come here.
        may_look = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if may_look and (n_needed := int(positions.max()) + 1) > n:
            raise ContextLengthError(f"{n_needed} tokens, but the position table has {n} rows")
        return tokens + self.table(positions + self.offset)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids, added to the token's vector."""

    def __init__(self, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        return tokens + sinusoid(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)


class ConcatenatedPositions(nn.Module):
    """[token; sinusoid]·W, W of 2d×d: more general than adding, at 2d² parameters (lecture E's question)."""

    def __init__(self, d_model: int, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style
        self.project = nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        vectors = sinusoid(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)
        return self.project(torch.cat((tokens, vectors.expand_as(tokens)), dim=-1))
