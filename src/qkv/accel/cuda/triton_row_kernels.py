"""Triton kernels for a decode step with a single row.

There are only four kernels per layer because launch latency dominates such a step. Each program loads its part of the
weights first because a decode step is bound by reading weights. With USE_PDL, the weights are loaded while the previous
kernel is still running. The program that computes attention for a head also multiplies the result by the output
projection, so many programs add to each element of the residual stream. The residual stream is therefore stored as
fixed-point integers, whose sum does not depend on the order of the additions. Numbers that are too large for this
format set `overflow`, which turns the row into NaN from then on.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qkv.accel.cuda.triton_functions import (
    apply_activation,
    attend_to_split,
    embed_token,
    load_norm_parameters,
    merge_splits,
    normalize,
)

FIXED_POINT_SCALE = tl.constexpr(2.0**36)
MAX_ADDEND, MAX_RESIDUAL = tl.constexpr(2.0**20), tl.constexpr(2.0**26)
"""Limits for a single addend, and for the residual stream when it is read.

The int64 fixed-point format overflows at 2²⁷. An undetected overflow would require 64 heads to add the largest possible
addend at once.
"""


@triton.jit
def _to_fixed_point(x, overflow_ptr, mask):
    """Convert `x` to fixed point. Elements that are too large or NaN become 0 and set the overflow flag."""
    fits = tl.abs(x) < MAX_ADDEND
    tl.store(overflow_ptr + tl.zeros_like(x).to(tl.int32), 1, mask=mask & ~fits)
    return (tl.where(fits, x, 0.0) * FIXED_POINT_SCALE).to(tl.int64)


@triton.jit
def _load_fixed_point_residual_or_nan(residual_ptr, overflow_ptr, cols, mask):
    """Load the residual stream as float32, or NaN after an overflow."""
    x = tl.load(residual_ptr + cols, mask=mask, other=0).to(tl.float32) * (1 / FIXED_POINT_SCALE)
    has_overflow = (tl.load(overflow_ptr) != 0) | (tl.abs(x) >= MAX_RESIDUAL)
    return tl.where(mask & has_overflow, float("nan"), x)


@triton.jit
def embed_row_kernel(
    ids_ptr, positions_ptr, token_embedding_ptr, position_embedding_ptr, residual_ptr, overflow_ptr, d_model, scale,
    HAS_POSITION_EMBEDDING: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the embedding of a single row to the residual stream and clear the overflow flag."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < d_model
    x = embed_token(
        ids_ptr, positions_ptr, token_embedding_ptr, position_embedding_ptr, row, cols, mask, d_model, scale,
        HAS_POSITION_EMBEDDING, USE_PDL,
    )  # fmt: skip
    tl.store(overflow_ptr, 0)
    tl.debug_barrier()  # the flag must be cleared before the conversion can set it
    tl.store(residual_ptr + cols, _to_fixed_point(x, overflow_ptr, mask), mask=mask)


@triton.jit
def _load_weights_and_biases(
    weight_ptr, bias_ptr, out_cols, in_cols, n_in, n_out, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr
):
    """Load the weight rows and biases of some outputs, and of the outputs that they gate."""
    out_mask = out_cols < n_out
    offsets = out_cols.to(tl.int64)[:, None] * n_in + in_cols[None, :]
    mask = out_mask[:, None] & (in_cols < n_in)[None, :]
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    up_weight = weight
    bias = tl.zeros_like(out_cols).to(tl.float32)
    up_bias = bias
    if HAS_BIAS:
        bias = tl.load(bias_ptr + out_cols, mask=out_mask, other=0).to(tl.float32)
    if IS_GATED:
        up_weight = tl.load(weight_ptr + n_out.to(tl.int64) * n_in + offsets, mask=mask, other=0)
        if HAS_BIAS:
            up_bias = tl.load(bias_ptr + n_out + out_cols, mask=out_mask, other=0).to(tl.float32)
    return weight, up_weight, bias, up_bias


@triton.jit
def linear_row_kernel(
    x_ptr, overflow_ptr, weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, n_in, n_out, eps, scale,
    NORM_KIND: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr, ADD_TO_OUTPUT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    N_ITERATIONS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute y = activation(norm(x) · Wᵀ · scale + bias) for the residual stream x.

    If IS_GATED, W has 2 · n_out rows, and the activation of the first n_out outputs is multiplied by the others. If
    ADD_TO_OUTPUT, x is a plain row, and the result is added to the residual stream y. The weights of an iteration are
    loaded during the previous iteration. The weights of the first iteration are loaded before anything else.
    """
    if USE_PDL:
        gdc_launch_dependents()
    out_cols = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    in_cols = tl.arange(0, BLOCK_IN)
    in_mask = in_cols < n_in
    weight, up_weight, bias, up_bias = _load_weights_and_biases(
        weight_ptr, bias_ptr, out_cols, in_cols, n_in, n_out, HAS_BIAS, IS_GATED
    )
    norm_weight, norm_bias = load_norm_parameters(
        norm_weight_ptr, norm_bias_ptr, in_cols, in_mask, NORM_KIND, HAS_NORM_BIAS
    )
    if USE_PDL:
        gdc_wait()
    x = (
        tl.load(x_ptr + in_cols, mask=in_mask, other=0).to(tl.float32)
        if ADD_TO_OUTPUT
        else _load_fixed_point_residual_or_nan(x_ptr, overflow_ptr, in_cols, in_mask)
    )
    x = normalize(x, in_mask, norm_weight, norm_bias, n_in, eps, NORM_KIND)
    for _ in range(N_ITERATIONS):
        next_out_cols = out_cols + tl.num_programs(0) * BLOCK_OUT
        if N_ITERATIONS > 1:
            next_weights = _load_weights_and_biases(
                weight_ptr, bias_ptr, next_out_cols, in_cols, n_in, n_out, HAS_BIAS, IS_GATED
            )
        out_mask = out_cols < n_out
        if ADD_TO_OUTPUT:
            residual = tl.load(y_ptr + out_cols, mask=out_mask, other=0)
        y = apply_activation(tl.sum(weight.to(tl.float32) * x[None, :], 1) * scale + bias, ACTIVATION)
        if IS_GATED:
            y *= tl.sum(up_weight.to(tl.float32) * x[None, :], 1) + up_bias
        if ADD_TO_OUTPUT:
            tl.store(y_ptr + out_cols, residual + _to_fixed_point(y, overflow_ptr, out_mask), mask=out_mask)
        else:
            tl.store(y_ptr + out_cols, y.to(y_ptr.dtype.element_ty), mask=out_mask)
        out_cols = next_out_cols
        if N_ITERATIONS > 1:
            weight, up_weight, bias, up_bias = next_weights


@triton.jit
def attention_out_proj_kernel(
    qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, splits_ptr, weight_ptr, bias_ptr, residual_ptr,
    overflow_ptr, capacity, scale, n_out, N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, D_HEAD: tl.constexpr,
    D_VALUE: tl.constexpr, IS_ROTARY: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_OUT: tl.constexpr, N_SPLITS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a head's output by its columns of the output projection, and add the result to the residual stream.

    If N_SPLITS == 1, each program computes the attention of its head. If N_SPLITS > 1, `decode_attention_kernel` has
    written partial results to `splits_ptr`.
    """
    if USE_PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    out_cols = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    value_cols = tl.arange(0, BLOCK_VALUE)
    out_mask = out_cols < n_out
    offsets = out_cols.to(tl.int64)[:, None] * (N_HEADS * D_VALUE) + head * D_VALUE + value_cols[None, :]
    weight = tl.load(weight_ptr + offsets, mask=out_mask[:, None] & (value_cols < D_VALUE)[None, :], other=0)
    bias = tl.zeros((BLOCK_OUT,), tl.float32)
    if HAS_BIAS:  # noqa: SIM102 - this condition is known at compile time, the inner one is not
        if head == 0:
            bias = tl.load(bias_ptr + out_cols, mask=out_mask, other=0).to(tl.float32)
    if N_SPLITS == 1:
        row = tl.program_id(2)  # always 0 because the grid has no third axis
        _, exp_sum, acc = attend_to_split(
            qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, capacity, scale, row, head, 0,
            tl.program_id(1) == 0, N_HEADS, N_KV_HEADS, D_HEAD, D_VALUE, IS_ROTARY, BLOCK_D, BLOCK_VALUE, BLOCK_KEYS,
            N_SPLITS, USE_PDL,
        )  # fmt: skip
        head_output = acc / exp_sum
    else:
        if USE_PDL:
            gdc_wait()
        head_output = merge_splits(splits_ptr, head, BLOCK_VALUE, N_SPLITS)
    y = tl.sum(weight.to(tl.float32) * head_output[None, :], 1) + bias
    tl.atomic_add(residual_ptr + out_cols, _to_fixed_point(y, overflow_ptr, out_mask), mask=out_mask, sem="relaxed")
