"""Multi-head attention with learned projections, for self-attention and cross-attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.cuda.fused_autograd import fused_qkv_linear_bf16, is_compiling_cuda_bf16_autocast_training
from qkv.choices import AttentionKernel, HeadCombination
from qkv.errors import ConfigError, ShapeError
from qkv.nn.cache import LayerCache, LayerSourceCache
from qkv.nn.dot_product_attention import AttentionInputs, fused_attention, masked_softmax
from qkv.nn.mask import Mask
from qkv.nn.relative_positions import PositionInfo
from qkv.nn.tap import Tap, has_hooks_or_is_active_tap
from qkv.tensors import HeadOutputs, Residual

MIN_TOKENS_FOR_FUSED_QKV = 1024
"""Minimum number of tokens for computing queries, keys and values with a single matmul.

With fewer tokens, concatenating the three matrices takes as much time as it saves.
"""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Number and width of the attention heads, and the method for combining their outputs."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    combination: HeadCombination = HeadCombination.SPLIT

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "d_head", "d_value"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads must be a multiple of n_kv_heads, got n_heads={self.n_heads} and n_kv_heads={self.n_kv_heads}"
            )

    @classmethod
    def split(cls, d_model: int, n_heads: int) -> "HeadConfig":
        """Create the usual layout of `n_heads` heads, each of width d_model / n_heads."""
        if n_heads < 1 or d_model % n_heads:
            raise ConfigError(f"d_model must be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}")
        width = d_model // n_heads
        return cls(n_heads=n_heads, n_kv_heads=n_heads, d_head=width, d_value=width)

    @property
    def d_combined(self) -> int:
        """Width of the combined head outputs before the output projection."""
        return self.n_heads * self.d_value if self.combination is HeadCombination.SPLIT else self.d_value


class Attention(nn.Module):
    """Multi-head attention over the input itself (self-attention) or over a source (cross-attention).

    Taps: `queries`, `keys` and `values` (after rotary embeddings), `inputs` (all of these with the mask), `scores`,
    `weights`, and `head_outputs`, the output of each head before the output projection. Observing `scores` or `weights`
    disables the fused kernel because these tensors exist only in the step-by-step implementation. Observing the other
    taps keeps the fused kernel enabled. At `inputs`, `scores` and `weights`, rows that share a source are folded into
    one row.
    """

    def __init__(
        self,
        d_model: int,
        head_config: HeadConfig,
        *,
        bias: bool = True,
        output_projection: bool = True,
        scale_scores: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not output_projection and head_config.d_combined != d_model:
            raise ConfigError(
                f"output_projection=False requires the combined width of the heads to equal d_model={d_model}, "
                f"got {head_config.d_combined}"
            )
        self.d_model = d_model
        self.head_config = head_config
        # A dot product of d_head independent terms has a standard deviation of √d_head. Dividing by √d_head prevents
        # the softmax from saturating.
        self.scale = head_config.d_head**-0.5 if scale_scores else 1.0
        self.has_bias, self.dropout = bias, dropout
        self.kernel = AttentionKernel.FUSED
        self.q_proj = nn.Linear(d_model, head_config.n_heads * head_config.d_head, bias=bias)
        self.k_proj = nn.Linear(d_model, head_config.n_kv_heads * head_config.d_head, bias=bias)
        self.v_proj = nn.Linear(d_model, head_config.n_kv_heads * head_config.d_value, bias=bias)
        self.out_proj = nn.Linear(head_config.d_combined, d_model, bias=bias) if output_projection else nn.Identity()
        self.queries, self.keys, self.values = Tap(), Tap(), Tap()
        self.inputs, self.scores, self.weights, self.head_outputs = Tap(), Tap(), Tap(), Tap()

    def forward(
        self,
        x: Residual,
        *,
        source: Float[Tensor, "source_batch key d_model"] | None = None,
        mask: Mask | None = None,
        position_info: PositionInfo | None = None,
        cache: LayerCache | LayerSourceCache | None = None,
    ) -> Residual:
        """Attend from `x` to `source`, or to `x` itself if no source is passed.

        Several consecutive rows of `x` may share one row of the source (the beams in a beam search).
        """
        self._check_inputs(x, source)
        if source is None and self._should_fuse_qkv(x):
            query, *key_value = self._project_fused_qkv(x)
        else:
            query, key_value = self.q_proj(x), []
        queries = self._split_heads(query, self.head_config.n_heads)
        if position_info is not None:
            queries = position_info.rotate(queries)
        keys, values = self._project_keys_values(x if source is None else source, key_value, position_info, cache)
        beams_per_source = queries.shape[0] // keys.shape[0]
        inputs = AttentionInputs(
            queries=_fold_beams(self.queries(queries), beams_per_source),
            keys=self.keys(keys),
            values=self.values(values),
            scale=self.scale,
            mask=mask,
            bias=None if position_info is None else position_info.bias,
            query_positions=None if cache is None else cache.query_positions,
            beams_per_source=beams_per_source,
        )
        head_outputs = self.head_outputs(inputs.unfold_beams(self._attend(self.inputs(inputs))))
        return self.out_proj(self._concat_or_pool_heads(head_outputs))

    def _should_fuse_qkv(self, x: Tensor) -> bool:
        """Return whether one matmul for queries, keys and values is faster than three and gives the same result.

        A replaced projection (for example a LoRA layer) or a hook on a projection requires separate matmuls.
        """
        if not x.is_cuda or x.shape[0] * x.shape[1] < MIN_TOKENS_FOR_FUSED_QKV:
            return False
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return all(
            type(projection) is nn.Linear and not has_hooks_or_is_active_tap(projection) for projection in projections
        )

    def _project_fused_qkv(self, x: Tensor) -> list[Tensor]:
        """Compute queries, keys and values with one matmul because three small matmuls would not fill a GPU."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([projection.weight for projection in projections])
        widths = [projection.out_features for projection in projections]
        bias = torch.cat([projection.bias for projection in projections]) if self.has_bias else None
        if bias is not None and is_compiling_cuda_bf16_autocast_training(x):
            return list(fused_qkv_linear_bf16(x, weight, bias, widths))
        return list(F.linear(x, weight, bias).split(widths, dim=-1))

    def _project_keys_values(
        self,
        source: Tensor,
        projected_key_value: list[Tensor],
        position_info: PositionInfo | None,
        cache: LayerCache | LayerSourceCache | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to, including cached ones.

        `projected_key_value` holds the key and value projections if they were already computed together with the query.
        """

        def project() -> tuple[Tensor, Tensor]:
            key, value = projected_key_value or (self.k_proj(source), self.v_proj(source))
            keys = self._split_heads(key, self.head_config.n_kv_heads)
            values = self._split_heads(value, self.head_config.n_kv_heads)
            # Keys are rotated before they are cached because their absolute positions never change.
            return (keys if position_info is None else position_info.rotate(keys)), values

        match cache:
            case None:
                return project()
            case LayerSourceCache():
                return cache.get_or_compute(project)
            case LayerCache():
                return cache.append(*project())

    def _attend(self, inputs: AttentionInputs) -> HeadOutputs:
        needs_weights = any(tap.has_interventions or tap.has_observers for tap in (self.scores, self.weights))
        dropout = self.dropout if self.training else 0.0
        if self.kernel is AttentionKernel.FUSED and not needs_weights:
            return fused_attention(inputs, dropout=dropout)
        weights = self.weights(masked_softmax(self.scores(inputs.scores())))
        return inputs.weighted_values(F.dropout(weights, dropout))

    def _split_heads(self, projected: Tensor, n_heads: int) -> Tensor:
        """Reshape (batch, position, head · width) to (batch, head, position, width)."""
        batch, n, _ = projected.shape
        return projected.view(batch, n, n_heads, -1).transpose(1, 2)

    def _concat_or_pool_heads(self, head_outputs: HeadOutputs) -> Tensor:
        match self.head_config.combination:
            case HeadCombination.SPLIT:
                return head_outputs.transpose(1, 2).flatten(2)
            case HeadCombination.POOLED:
                return head_outputs.sum(1)
            case HeadCombination.POOLED_MEAN:
                return head_outputs.mean(1)

    def _check_inputs(self, x: Tensor, source: Tensor | None) -> None:
        for name, tensor in (("x", x), ("source", source)):
            if tensor is None:
                continue
            if tensor.shape[-1] != self.d_model:
                raise ShapeError(f"{name} has width {tensor.shape[-1]}, expected d_model={self.d_model}")
            if tensor.shape[1] == 0:
                raise ShapeError(f"{name} has 0 positions, expected at least 1")
        if source is not None and x.shape[0] % source.shape[0]:
            raise ShapeError(
                f"the number of rows of x must be a multiple of the number of sources, "
                f"got {x.shape[0]} rows and {source.shape[0]} sources"
            )


def _fold_beams(queries: Tensor, beams_per_source: int) -> Tensor:
    """Move the beams of each source into the query axis so that they share its keys and values without a copy."""
    if beams_per_source == 1:
        return queries
    rows, n_heads, n, width = queries.shape
    n_sources = rows // beams_per_source
    grouped = queries.view(n_sources, beams_per_source, n_heads, n, width).transpose(1, 2)
    return grouped.reshape(n_sources, n_heads, beams_per_source * n, width)


@contextmanager
def use_attention_kernel(model: nn.Module, kernel: AttentionKernel) -> Iterator[None]:
    """Make every attention layer of the model use the given kernel inside the context."""
    previous = [(module, module.kernel) for module in model.modules() if isinstance(module, Attention)]
    for module, _ in previous:
        module.kernel = kernel
    try:
        yield
    finally:
        for module, old_kernel in previous:
            module.kernel = old_kernel
