"""Replacements for modules of the reference that run faster on an NVIDIA GPU.

`engines.accelerated` installs them. Each class overrides one method of a reference module and computes the same result
up to rounding. Whether the faster computation applies is decided in every call, because it can depend on the shape of
the input, on torch.compile and on autocast.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.cuda.compile_checks import is_compiled_for_inference, should_fuse_linear_gelu_for_inference
from qkv.accel.cuda.fused_autograd import (
    fused_loss_sum,
    fused_qkv_linear_bf16,
    is_compiling_cuda_bf16_autocast_training,
    linear_fused_bias_gelu,
    residual_and_bf16_norm_fused_backward,
)
from qkv.accel.cuda.materialize import materialize_under_compile
from qkv.accel.support import has_hooks_or_is_active_tap, known_norm
from qkv.accel.swap import SublayerFunction, share_attributes
from qkv.choices import Activation, NormPosition
from qkv.nn import Attention, Block, FeedForward, Tap, Unembedding
from qkv.nn.block import activate
from qkv.nn.embedding import InputEmbedding
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.positions import (
    ConcatenatedSinusoidalPositions,
    PositionInfo,
    RotaryEmbedding,
    SinusoidalPositions,
    sinusoidal_encoding,
)
from qkv.tensors import Ids, KeyPositions, Keys, Patches, Positions, Queries, QueryPositions, Residual, Values

MIN_TOKENS_FOR_FUSED_QKV = 1024
"""Minimum number of tokens for computing queries, keys and values with a single matmul.

With fewer tokens, concatenating the three matrices takes as much time as it saves.
"""
NORMAL_TAIL_COEFFICIENTS = (
    0.9999962,
    1.151225,
    0.45857096,
    0.05380521,
    -0.0084041990,
    8.957442e-4,
    -5.592328e-5,
    1.4766356e-6,
)
"""Coefficients of a polynomial that approximates −log₂ Φ(−a), constant term first.

The polynomial is a minimax fit for 0 ≤ a ≤ 6.5 (of the relative error, or of an absolute error of 1e-5). Beyond 6.5, it
keeps growing, so Φ(−a) still approaches 0.
"""


class FusedAttention(Attention):
    """Attention that computes queries, keys and values with one matmul, because three small ones do not fill a GPU."""

    def project_qkv(self, x: Residual) -> tuple[Queries, Keys, Values]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if not (should_fuse_qkv(x) and all(map(_is_plain_linear, projections))):
            return super().project_qkv(x)
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections]) if self.has_bias else None
        widths = [projection.out_features for projection in projections]
        if bias is not None and is_compiling_cuda_bf16_autocast_training(x):
            query, key, value = fused_qkv_linear_bf16(x, weight, bias, widths)
        else:
            query, key, value = F.linear(x, weight, bias).split(widths, dim=-1)
        config = self.head_config
        return (
            self.split_heads(query, config.n_heads),
            self.split_heads(key, config.n_kv_heads),
            self.split_heads(value, config.n_kv_heads),
        )


class FusedFeedForward(FeedForward):
    """Feed-forward layer that fuses the bias and the activation into the up-projection, or both projections of a gate.

    GELU is computed without `erf` in compiled inference.
    """

    def forward(self, x: Residual) -> Residual:
        hidden = self._gated_hidden(x) if self.gate_proj is not None else self._ungated_hidden(x)
        return self.down_proj(self.hidden(hidden))

    def _gated_hidden(self, x: Tensor) -> Tensor:
        assert self.gate_proj is not None
        projections = (self.gate_proj, self.up_proj)
        if not (is_compiling_cuda_bf16_autocast_training(x) and all(map(_is_plain_linear, projections))):
            return activate_fast(self.gate_proj(x), self.activation) * self.up_proj(x)
        # With one matmul for both projections, x is read only once and its gradient requires only one matmul.
        bias = torch.cat([projection.bias for projection in projections]) if self.has_bias else None
        weight = torch.cat([projection.weight for projection in projections])
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        return activate_fast(gate, self.activation) * up

    def _ungated_hidden(self, x: Tensor) -> Tensor:
        up_proj = self.up_proj
        if _is_plain_linear(up_proj) and self.has_bias and self.activation is Activation.GELU:
            if is_compiling_cuda_bf16_autocast_training(x):
                return linear_fused_bias_gelu(x, up_proj.weight, up_proj.bias)
            if should_fuse_linear_gelu_for_inference(x, up_proj.weight):
                # Imported here because Triton is installed only with CUDA builds of PyTorch.
                from qkv.accel.cuda.linear_gelu_kernel import fused_linear_gelu

                return fused_linear_gelu(x, up_proj.weight, up_proj.bias)
        return activate_fast(up_proj(x), self.activation)


class FusedBlock(Block):
    """Block whose norms run in the same backward kernel as the residual connection around the sub-layer."""

    def add_sublayer(self, x: Residual, norm: nn.Module, sublayer: SublayerFunction, tap: Tap) -> Residual:
        can_fuse = (
            self.norm_position is NormPosition.PRE
            and is_compiling_cuda_bf16_autocast_training(x)
            and x.dtype is torch.bfloat16
            and not has_hooks_or_is_active_tap(norm)
        )
        if not can_fuse or type(norm) not in (LayerNorm, RMSNorm):
            return super().add_sublayer(x, norm, sublayer, tap)
        x, normed = residual_and_bf16_norm_fused_backward(x, known_norm(norm))
        return x + self.dropout(tap(sublayer(normed)))


class AutocastInputEmbedding(InputEmbedding):
    """Input embedding that casts the residual stream to the autocast dtype in compiled code.

    Norms still use float32. Reading and writing the residual stream in float32 would take twice as long.
    """

    def forward(self, ids: Ids | Patches, positions: Positions, segments: Ids | None = None) -> Residual:
        x = super().forward(ids, positions, segments)
        is_compiled = x.is_cuda and torch.compiler.is_compiling() and torch.is_autocast_enabled("cuda")
        return x.to(torch.get_autocast_dtype("cuda")) if is_compiled else x


class MaterializedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding whose sines and cosines are computed once per forward pass in compiled code."""

    def forward(
        self, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype = torch.float32
    ) -> PositionInfo:
        rotation = super().forward(query_positions, key_positions, dtype).rotation
        assert rotation is not None
        cos, sin = rotation
        return PositionInfo(rotation=(materialize_under_compile(cos), materialize_under_compile(sin)))


class MaterializedSinusoidalPositions(SinusoidalPositions):
    """Sinusoidal positions whose table is computed once per forward pass in compiled code."""

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        table = sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)
        return tokens + materialize_under_compile(table)


class MaterializedConcatenatedSinusoidalPositions(ConcatenatedSinusoidalPositions):
    """Concatenated sinusoidal positions whose table is computed once per forward pass in compiled code."""

    def forward(self, tokens: Residual, positions: Positions) -> Residual:
        table = sinusoidal_encoding(positions, tokens.shape[-1], self.style, dtype=tokens.dtype)
        return self.project(torch.cat((tokens, materialize_under_compile(table).expand_as(tokens)), dim=-1))


class FusedUnembedding(Unembedding):
    """Unembedding that can also compute the loss, in one pass over the logits."""

    def loss_sum(self, states: Residual, targets: Ids, *, chunk: int | None = None, smoothing: float = 0.0) -> Tensor:
        """Return −Σ log p(target), ignoring negative targets, with logits for at most `chunk` positions at a time."""
        flat = states.flatten(0, 1) * self.scale
        return fused_loss_sum(flat, self.weight, self.bias, targets.flatten(), chunk=chunk, smoothing=smoothing)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: FusedAttention,
    FeedForward: FusedFeedForward,
    Block: FusedBlock,
    InputEmbedding: AutocastInputEmbedding,
    Unembedding: FusedUnembedding,
    RotaryEmbedding: MaterializedRotaryEmbedding,
    SinusoidalPositions: MaterializedSinusoidalPositions,
    ConcatenatedSinusoidalPositions: MaterializedConcatenatedSinusoidalPositions,
}


def find_fused_replacement(module: nn.Module) -> nn.Module | None:
    """Return the replacement of a module, or `None` if it has none."""
    replacement_class = REPLACEMENTS.get(type(module))
    return None if replacement_class is None else share_attributes(module, replacement_class)


def find_fused_loss(unembedding: Unembedding) -> Callable[..., Tensor] | None:
    """Return the loss function of an unembedding that has been replaced, or `None` if it has not been replaced."""
    return unembedding.loss_sum if isinstance(unembedding, FusedUnembedding) else None


def should_fuse_qkv(x: Tensor) -> bool:
    """Return whether a single matmul for queries, keys and values is faster than three."""
    return x.is_cuda and x.shape[0] * x.shape[1] >= MIN_TOKENS_FOR_FUSED_QKV


def activate_fast(x: Tensor, activation: Activation) -> Tensor:
    """Compute the activation. In compiled inference, GELU is computed without `erf`."""
    if activation is Activation.GELU and is_compiled_for_inference(x):
        return erf_gelu_by_exp2(x)
    return activate(x, activation)


def erf_gelu_by_exp2(x: Tensor) -> Tensor:
    """Compute GELU as max(x, 0) − |x|·Φ(−|x|), where Φ is evaluated as a power of 2.

    The error is at most 5e-7, as with a float32 erf. On a GPU, evaluating erf takes longer than reading and writing the
    tensors.
    """
    a = x.float().abs()
    power = torch.full_like(a, NORMAL_TAIL_COEFFICIENTS[-1])
    for coefficient in NORMAL_TAIL_COEFFICIENTS[-2::-1]:
        power = power * a + coefficient
    return (x.float().relu() - a * torch.exp2(-power)).to(x.dtype)


def _is_plain_linear(layer: nn.Module) -> bool:
    """Return whether the weights of a layer may be used directly.

    A replaced layer (for example a LoRA layer) or a layer with hooks must be called.
    """
    return type(layer) is nn.Linear and not has_hooks_or_is_active_tap(layer)
