"""Compute scaled dot-product attention, either step by step or with PyTorch's fused kernel.

Implements eq. 1 of arXiv:1706.03762. The step-by-step implementation (`AttentionInputs.scores`, `masked_softmax`,
`AttentionInputs.weighted_values`) is the specification, and the fused implementation must agree with it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.accel.cuda.compile_checks import is_compiled_for_inference
from qkv.choices import AttentionKernel
from qkv.errors import ShapeError
from qkv.nn.mask import Mask
from qkv.tensors import AttentionWeights, HeadOutputs, Keys, Queries, QueryPositions, ScoreBias, Scores, Values

MAX_SHORT_SEQLEN = 128
"""Maximum sequence length for the short-sequence Triton kernel, which loads all keys as one block."""


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of one attention operation: queries, keys, values, mask and bias."""

    queries: Queries
    keys: Keys
    values: Values
    scale: float
    mask: Mask | None = None
    bias: ScoreBias | None = None
    query_positions: Int[Tensor, "#text position"] | None = None
    """Positions of the queries within their sequences. `None` means 0, 1, 2, …"""
    beams_per_source: int = 1
    """Number of batch rows that share one row of keys. Their queries are concatenated along the query axis."""

    def __post_init__(self) -> None:
        if self.mask is not None:
            batch, n_heads, n_queries, _ = self.queries.shape
            n_keys = self.keys.shape[-2]
            self.mask.check_shapes(batch=batch, n_heads=n_heads, n_queries=n_queries, n_keys=n_keys)

    def scores(self) -> Scores:
        """Compute the attention scores q·k·scale (+ bias), with −∞ at masked keys."""
        scores = self.queries @ self._repeat_kv_heads(self.keys).transpose(-2, -1) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.mask is not None:
            visible = self.mask.to_dense(scores.shape[-2], scores.shape[-1], scores.device)
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores

    def weights(self) -> AttentionWeights:
        return masked_softmax(self.scores())

    def weighted_values(self, weights: AttentionWeights) -> HeadOutputs:
        """Compute the sum of the values, weighted by `weights`, for each head and query."""
        return weights.to(self.values.dtype) @ self._repeat_kv_heads(self.values)

    def select_queries(self, query_indices: Tensor) -> "AttentionInputs":
        """Return the inputs restricted to the given query indices of each sequence."""
        n = self.queries.shape[-2] // self.beams_per_source
        starts = torch.arange(0, self.beams_per_source * n, n, device=query_indices.device)
        positions = query_indices[None] if self.query_positions is None else self.query_positions[:, query_indices]
        folded = (starts[:, None] + query_indices).flatten()
        mask = self.mask
        if mask is not None:
            visible = mask.to_dense(self.queries.shape[-2], self.keys.shape[-2], self.queries.device)
            mask = Mask(dense=visible if visible.shape[2] == 1 else visible[:, :, folded])
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias[:, :, folded]
        return replace(self, queries=self.queries[:, :, folded], mask=mask, bias=bias, query_positions=positions)

    def broadcast_query_positions(self) -> QueryPositions:
        """Return the position of every query within its own sequence, expanded to (batch, query)."""
        n = self.queries.shape[-2] // self.beams_per_source
        positions = self.query_positions
        if positions is None:
            positions = torch.arange(n, device=self.queries.device)[None]
        n_sequences = self.queries.shape[0] * self.beams_per_source
        return positions.expand(n_sequences, n).reshape(self.queries.shape[0], -1)

    def unfold_beams(
        self, outputs: Float[Tensor, "batch head query width"]
    ) -> Float[Tensor, "text head position width"]:
        """Move the beams from the query axis back to the batch axis so that each sequence is a batch row again."""
        if self.beams_per_source == 1:
            return outputs
        batch, n_heads, n_all, width = outputs.shape
        n = n_all // self.beams_per_source
        grouped = outputs.view(batch, n_heads, self.beams_per_source, n, width).transpose(1, 2)
        return grouped.reshape(batch * self.beams_per_source, n_heads, n, width)

    def _repeat_kv_heads(self, kv: Tensor) -> Tensor:
        """Repeat key/value heads so that there is one per query head (grouped-query attention)."""
        group_size = self.queries.shape[1] // kv.shape[1]
        return kv.repeat_interleave(group_size, dim=1)


def masked_softmax(scores: Scores) -> AttentionWeights:
    """Compute the softmax of the scores over the keys.

    Fully masked rows result in zeros, whereas a plain softmax would return NaN.
    """
    is_empty_row = (scores == float("-inf")).all(-1, keepdim=True)
    safe = scores.masked_fill(is_empty_row, 0.0)
    return safe.softmax(-1).masked_fill(is_empty_row, 0.0)


def fused_attention(inputs: AttentionInputs, *, dropout: float = 0.0) -> HeadOutputs:
    """Compute `inputs.weighted_values(inputs.weights())` with a fused kernel that never stores the weights."""
    if dropout == 0.0 and _can_use_varlen_kernel(inputs):
        return _varlen_attention(inputs)
    is_empty_row = attn_mask = None
    n_queries, n_keys = inputs.queries.shape[-2], inputs.keys.shape[-2]
    mask = inputs.mask
    is_causal = False
    # An `if` is used instead of a boolean expression because with dynamic shapes, torch.compile would turn the
    # comparison into a symbolic value, which the kernel does not accept as `is_causal`.
    if mask is not None and mask.dense is None and mask.is_causal_only and n_queries == n_keys:
        is_causal = True
    if is_causal and inputs.bias is None:
        # The kernel's is_causal aligns the mask to the top left, which is correct only for square scores.
        pass
    elif mask is not None:
        is_causal = False
        visible = mask.to_dense(n_queries, n_keys, inputs.queries.device)
        attn_mask = visible
        if not mask.no_empty_rows:
            # To avoid NaN gradients, fully masked rows attend to everything here and are set to zero at the end.
            is_empty_row = ~visible.any(-1, keepdim=True)
            attn_mask = visible | is_empty_row
        if inputs.bias is not None:
            attn_mask = inputs.bias.masked_fill(~attn_mask, float("-inf"))
        else:
            attn_mask = attn_mask.expand(-1, -1, n_queries, -1)
    else:
        attn_mask = inputs.bias
    outputs = F.scaled_dot_product_attention(
        inputs.queries,
        inputs.keys,
        inputs.values,
        attn_mask=(
            attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(inputs.queries.dtype)
        ),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=inputs.scale,
        enable_gqa=inputs.queries.shape[1] != inputs.keys.shape[1],
    )
    return outputs if is_empty_row is None else outputs.masked_fill(is_empty_row, 0.0)


def _can_use_varlen_kernel(inputs: AttentionInputs) -> bool:
    """Return whether PyTorch's variable-length kernel supports these inputs.

    The kernel requires 16-bit tensors of equal widths on a GPU, without a bias.
    """
    mask, queries = inputs.mask, inputs.queries
    if mask is None or not queries.is_cuda or queries.dtype not in (torch.bfloat16, torch.float16):
        return False
    has_default_scores = inputs.scale == queries.shape[-1] ** -0.5 and inputs.bias is None
    return has_default_scores and mask.dense is None and mask.is_varlen_only and queries.shape == inputs.values.shape


def _varlen_attention(inputs: AttentionInputs) -> HeadOutputs:
    assert inputs.mask is not None
    varlen = inputs.mask.varlen
    assert varlen is not None
    # (1, head, position, d_head) → (position, head, d_head), the layout of variable-length kernels.
    queries, keys, values = (part[0].transpose(0, 1) for part in (inputs.queries, inputs.keys, inputs.values))
    cu_seqlens, max_seqlen = varlen.cu_seqlens, varlen.max_seqlen
    can_be_short = max_seqlen <= MAX_SHORT_SEQLEN and queries.shape[-1] in (16, 32, 64, 128)
    if can_be_short and is_compiled_for_inference(queries):
        # Imported here because Triton is not available on machines without a GPU.
        from qkv.accel.cuda.varlen_kernel import short_varlen_attention

        return short_varlen_attention(queries, keys, values, cu_seqlens, max_seqlen).transpose(0, 1)[None]
    from torch.nn.attention.varlen import varlen_attn

    outputs = varlen_attn(queries, keys, values, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(outputs, Tensor)
    return outputs.transpose(0, 1)[None]


def scaled_dot_product_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    *,
    mask: Mask | None = None,
    kernel: AttentionKernel = AttentionKernel.FUSED,
) -> HeadOutputs:
    """Compute softmax(QKᵀ/√d)V without any learned projections."""
    if queries.shape[-1] != keys.shape[-1] or keys.shape[-2] != values.shape[-2]:
        raise ShapeError(
            f"queries and keys must have the same width, and keys and values the same length, got queries of width "
            f"{queries.shape[-1]}, keys of width {keys.shape[-1]} and length {keys.shape[-2]}, "
            f"and values of length {values.shape[-2]}"
        )
    if queries.shape[0] != keys.shape[0] or queries.shape[1] % keys.shape[1]:
        raise ShapeError(
            f"queries and keys must have the same number of rows, and n_heads must be a multiple of n_kv_heads, "
            f"got queries of {queries.shape[0]} rows and {queries.shape[1]} heads "
            f"and keys of {keys.shape[0]} rows and {keys.shape[1]} heads"
        )
    inputs = AttentionInputs(queries=queries, keys=keys, values=values, scale=queries.shape[-1] ** -0.5, mask=mask)
    return fused_attention(inputs) if kernel is AttentionKernel.FUSED else inputs.weighted_values(inputs.weights())
