"""Multi-head attention: scaled dot-product attention, and the layer that projects its inputs and outputs.

`AttentionInputs.scores`, `masked_softmax` and `AttentionInputs.weighted_values` compute eq. 1 of arXiv:1706.03762 step
by step and are the specification. `fused_attention` computes the same result with PyTorch's fused kernel, which never
stores the attention weights and is therefore faster and needs less memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import AttentionKernel, HeadCombination
from qkv.errors import ConfigError, ShapeError
from qkv.nn.cache import LayerCache, LayerSourceCache
from qkv.nn.mask import Mask
from qkv.nn.positions import PositionInfo
from qkv.nn.tap import Tap
from qkv.tensors import AttentionWeights, HeadOutputs, Keys, Queries, Residual, ScoreBias, Scores, Values


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of one attention operation: queries, keys, values, mask and bias."""

    queries: Queries
    keys: Keys
    values: Values
    scale: float
    mask: Mask | None = None
    bias: ScoreBias | None = None
    query_positions: Int[Tensor, "#batch position"] | None = None
    """Positions of the queries in the cache, for recording (`inspection`). The mask has its own positions."""
    beams_per_source: int = 1
    """Number of batch rows that share one row of keys. Their queries are concatenated along the query axis."""

    def __post_init__(self) -> None:
        # Beams have already been moved to the query axis, so queries and keys have the same number of rows.
        (batch, n_heads, n_queries, d_head), (n_rows, n_kv_heads, n_keys, _) = self.queries.shape, self.keys.shape
        if batch != n_rows or n_heads % n_kv_heads or d_head != self.keys.shape[3] or n_keys != self.values.shape[2]:
            shapes = [tuple(tensor.shape) for tensor in (self.queries, self.keys, self.values)]
            raise ShapeError(f"queries, keys and values have shapes {shapes}, which do not match")
        if self.mask is not None:
            self.mask.check_shapes(n_queries, n_keys, batch=batch, n_heads=n_heads)

    def scores(self) -> Scores:
        """Compute the attention scores q·k·scale (+ bias), with −∞ at masked keys."""
        # (batch, head, query, d_head) @ (batch, head, d_head, key): one dot product for each query and key.
        scores = self.queries @ self._repeat_kv_heads(self.keys).transpose(-2, -1) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.mask is not None:
            # The softmax turns −∞ into a weight of exactly 0.
            visible = self.mask.to_dense(scores.shape[-2], scores.shape[-1], scores.device)
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores

    def weights(self) -> AttentionWeights:
        return masked_softmax(self.scores())

    def weighted_values(self, weights: AttentionWeights) -> HeadOutputs:
        """Compute the sum of the values, weighted by `weights`, for each head and query."""
        # (batch, head, query, key) @ (batch, head, key, d_value) → (batch, head, query, d_value)
        return weights.to(self.values.dtype) @ self._repeat_kv_heads(self.values)

    def unfold_beams(
        self, outputs: Float[Tensor, "batch head query width"]
    ) -> Float[Tensor, "row head position width"]:
        """Undo `_fold_beams`: move the beams from the query axis back to the batch axis, one row per sequence."""
        if self.beams_per_source == 1:
            return outputs
        batch, n_heads, n_all, width = outputs.shape
        n = n_all // self.beams_per_source
        grouped = outputs.view(batch, n_heads, self.beams_per_source, n, width).transpose(1, 2)
        return grouped.reshape(batch * self.beams_per_source, n_heads, n, width)

    def _repeat_kv_heads(self, kv: Tensor) -> Tensor:
        """Repeat key/value heads so that there is one per query head (grouped-query attention)."""
        # Fewer key/value heads make the cache smaller. With a single one, this is multi-query attention.
        group_size = self.queries.shape[1] // kv.shape[1]
        return kv.repeat_interleave(group_size, dim=1)


def masked_softmax(scores: Scores) -> AttentionWeights:
    """Compute the softmax of the scores over the keys.

    Fully masked rows become zeros, whereas a plain softmax would return NaN.
    """
    # In a row of −∞, every exponential is 0, and the softmax would divide 0 by 0.
    is_empty_row = (scores == float("-inf")).all(-1, keepdim=True)
    safe = scores.masked_fill(is_empty_row, 0.0)
    return safe.softmax(-1).masked_fill(is_empty_row, 0.0)


def fused_attention(inputs: AttentionInputs, *, dropout: float = 0.0) -> HeadOutputs:
    """Compute `inputs.weighted_values(inputs.weights())` with a fused kernel that never stores the weights."""
    mask, n_queries, n_keys = inputs.mask, inputs.queries.shape[-2], inputs.keys.shape[-2]
    is_causal, attn_mask, is_empty_row = False, inputs.bias, None
    if mask is not None and mask.is_causal_only and mask.dense is None and n_queries == n_keys and inputs.bias is None:
        # The kernel's `is_causal` aligns the mask to the top left, which is correct only for square scores.
        is_causal = True
    elif mask is not None:
        visible = mask.to_dense(n_queries, n_keys, inputs.queries.device)
        if not mask.no_empty_rows:
            # A row without any visible key would give NaN gradients. Such rows attend to everything here and are set to
            # zero at the end.
            is_empty_row = ~visible.any(-1, keepdim=True)
            visible = visible | is_empty_row
        if inputs.bias is None:
            attn_mask = visible.expand(-1, -1, n_queries, -1)  # the kernel does not broadcast the query axis
        else:
            attn_mask = inputs.bias.masked_fill(~visible, float("-inf"))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(inputs.queries.dtype)
    outputs = F.scaled_dot_product_attention(
        inputs.queries,
        inputs.keys,
        inputs.values,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout,
        scale=inputs.scale,
        enable_gqa=inputs.queries.shape[1] != inputs.keys.shape[1],
    )
    return outputs if is_empty_row is None else outputs.masked_fill(is_empty_row, 0.0)


def scaled_dot_product_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    *,
    mask: Mask | None = None,
    kernel: AttentionKernel = AttentionKernel.FUSED,
) -> HeadOutputs:
    """Compute softmax(QKᵀ/√d)V without any learned projections."""
    inputs = AttentionInputs(queries=queries, keys=keys, values=values, scale=queries.shape[-1] ** -0.5, mask=mask)
    return fused_attention(inputs) if kernel is AttentionKernel.FUSED else inputs.weighted_values(inputs.weights())


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
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")

    @classmethod
    def split(cls, d_model: int, n_heads: int) -> "HeadConfig":
        """Create the usual layout of `n_heads` heads, each of width d_model / n_heads."""
        if n_heads < 1 or d_model % n_heads:
            raise ConfigError(f"d_model={d_model} must be a multiple of n_heads={n_heads}")
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
            width = head_config.d_combined
            raise ConfigError(f"without output_projection, the heads must be d_model={d_model} wide, got {width}")
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
        # Taps are identity modules: `self.queries(queries)` returns `queries` unless somebody changes it.
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
        if source is None:
            # Self-attention: queries, keys and values are three projections of the same tokens.
            queries, keys, values = self.project_qkv(x)
            if position_info is not None:
                # Keys are rotated before they are cached because their absolute positions never change.
                queries, keys = position_info.rotate(queries), position_info.rotate(keys)
            if isinstance(cache, LayerCache):
                # In a decode step, x is only the newest token, but it attends to all tokens so far.
                keys, values = cache.append(keys, values)
        else:
            # Cross-attention: the queries come from the target, and the keys and values from the source.
            queries = self.split_heads(self.q_proj(x), self.head_config.n_heads)
            # The keys and values of a source are the same in every decode step, so they are computed only once.
            source_cache = cache if isinstance(cache, LayerSourceCache) else LayerSourceCache()
            keys, values = source_cache.get_or_compute(lambda: self._project_keys_values(source))
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
        # Each head has its own attention weights, so different heads can attend to different tokens. The output
        # projection mixes their results.
        head_outputs = self.head_outputs(inputs.unfold_beams(self._attend(self.inputs(inputs))))
        return self.out_proj(self.combine_heads(head_outputs))

    def project_qkv(self, x: Residual) -> tuple[Queries, Keys, Values]:
        """Project `x` to queries, keys and values and split them into heads, for self-attention."""
        return self.split_heads(self.q_proj(x), self.head_config.n_heads), *self._project_keys_values(x)

    def _project_keys_values(self, x: Tensor) -> tuple[Keys, Values]:
        n_heads = self.head_config.n_kv_heads
        return self.split_heads(self.k_proj(x), n_heads), self.split_heads(self.v_proj(x), n_heads)

    def _attend(self, inputs: AttentionInputs) -> HeadOutputs:
        # The fused kernel never stores scores and weights, so observing or changing them requires the explicit steps.
        needs_weights = any(tap.interventions or tap.observers for tap in (self.scores, self.weights))
        dropout = self.dropout if self.training else 0.0
        if self.kernel is AttentionKernel.FUSED and not needs_weights:
            return fused_attention(inputs, dropout=dropout)
        weights = self.weights(masked_softmax(self.scores(inputs.scores())))
        return inputs.weighted_values(F.dropout(weights, dropout))

    @staticmethod
    def split_heads(projected: Tensor, n_heads: int) -> Tensor:
        """Reshape (batch, position, head · width) to (batch, head, position, width)."""
        # With the head axis next to the batch axis, one batched matrix product computes all heads.
        batch, n, _ = projected.shape
        return projected.view(batch, n, n_heads, -1).transpose(1, 2)

    def combine_heads(self, head_outputs: HeadOutputs) -> Residual:
        """Concatenate the head outputs of each position, or pool them by summing or averaging (lecture E)."""
        match self.head_config.combination:
            case HeadCombination.SPLIT:
                return head_outputs.transpose(1, 2).flatten(2)
            case HeadCombination.POOLED:
                return head_outputs.sum(1)
            case HeadCombination.POOLED_MEAN:
                return head_outputs.mean(1)

    def _check_inputs(self, x: Tensor, source: Tensor | None) -> None:
        for name, tensor in (("x", x), ("source", x if source is None else source)):
            if tensor.shape[-1] != self.d_model or tensor.shape[1] == 0:
                expected = f"(batch, at least 1 position, d_model={self.d_model})"
                raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        if source is not None and x.shape[0] % source.shape[0]:
            raise ShapeError(f"the rows of x must be a multiple of the sources, got {x.shape[0]} and {source.shape[0]}")


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
