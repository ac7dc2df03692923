"""Absolute position embeddings, which are learned, sinusoidal, or sinusoidal with concatenation and projection."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.accel.cuda.materialize import materialize_under_compile
from qkv.choices import SinusoidStyle
from qkv.errors import ConfigError, ContextLengthError
from qkv.tensors import Positions, Residual


def sinusoidal_encoding(
    positions: Positions,
    d_model: int,
    style: SinusoidStyle = SinusoidStyle.INTERLEAVED,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "#batch position d_model"]:
    """Compute the sine and cosine of position · 10000^(−2i/d) for each position (arXiv:1706.03762, section 3.5)."""
    if d_model % 2:
        raise ConfigError(f"sinusoidal positions require an even d_model, got d_model={d_model}")
    first = 1 if style is SinusoidStyle.INTERLEAVED_FROM_ONE else 0
    # The angles are computed in float64 because float32 would be too inaccurate for distant positions.
    pairs = torch.arange(first, first + d_model // 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * 10000 ** (-2 * pairs / d_model)
    match style:
        case SinusoidStyle.HALVES:
            vectors = torch.cat((angles.sin(), angles.cos()), dim=-1)
        case SinusoidStyle.INTERLEAVED | SinusoidStyle.INTERLEAVED_FROM_ONE:
            vectors = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return materialize_under_compile(vectors.to(dtype))


class LearnedPositions(nn.Module):
    """Learned position embeddings, added to the token embeddings.

    Position p uses row p + `offset` of the table. BART and RoBERTa tables start with unused rows.
    """

    def __init__(self, context_length: int, d_model: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = nn.Embedding(context_length + offset, d_model)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        n = self.table.num_embeddings - self.offset
        # Values are checked only on the CPU because reading them would synchronize with a GPU. The models check the
        # length before they call this layer.
        can_check = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_check and (n_needed := int(positions.max()) + 1) > n:
            raise ContextLengthError(f"the input has {n_needed} tokens, but the position table has only {n} rows")
        return tokens + self.table(positions + self.offset)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoidal position embeddings, added to the token embeddings."""

    def __init__(self, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        return tokens + sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)


class ConcatenatedSinusoidalPositions(nn.Module):
    """Sinusoidal embeddings concatenated with the token embeddings and projected back to d_model.

    The projection [token; sinusoid]·W with W of shape 2d×d is more general than adding token embeddings and sinusoids,
    and costs 2d² parameters (lecture E).
    """

    def __init__(self, d_model: int, *, style: SinusoidStyle = SinusoidStyle.INTERLEAVED) -> None:
        super().__init__()
        self.style = style
        self.project = nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        vectors = sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)
        return self.project(torch.cat((tokens, vectors.expand_as(tokens)), dim=-1))
