"""Triton kernels for a decode step with several rows, and for greedy selection of the next token.

With USE_PDL (programmatic dependent launch, on Hopper and newer GPUs), a kernel may start before the previous kernel
has finished, and waits before it accesses results of that kernel. The residual stream is float32. Weights, keys and
values have the dtype of the model. `cuda_decode_forward` launches these kernels, and `triton_row_kernels` contains the
kernels for a single row.
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


@triton.jit
def embed_kernel(
    ids_ptr, positions_ptr, token_embedding_ptr, position_embedding_ptr, residual_ptr, d_model, scale,
    HAS_POSITION_EMBEDDING: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the token embedding plus the position embedding of each row to the residual stream."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < d_model
    x = embed_token(
        ids_ptr, positions_ptr, token_embedding_ptr, position_embedding_ptr, row, cols, mask, d_model, scale,
        HAS_POSITION_EMBEDDING, USE_PDL,
    )  # fmt: skip
    tl.store(residual_ptr + row * d_model + cols, x, mask=mask)


@triton.jit
def norm_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, n_cols, eps, NORM_KIND: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute y[row] = norm(x[row])."""
    if USE_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    weight, bias = load_norm_parameters(norm_weight_ptr, norm_bias_ptr, cols, mask, NORM_KIND, HAS_NORM_BIAS)
    if USE_PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0).to(tl.float32)
    x = normalize(x, mask, weight, bias, n_cols, eps, NORM_KIND)
    tl.store(y_ptr + row * n_cols + cols, x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, n_rows, n_in, n_out, scale, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr, ADD_TO_OUTPUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute y = activation(x · Wᵀ · scale + bias), or add it to y.

    If IS_GATED, W has 2 · n_out rows, and the activation of the first n_out outputs is multiplied by the others.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    out_cols = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out_mask, row_mask = out_cols < n_out, rows < n_rows
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    up_acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, n_in, BLOCK_IN):
        in_cols = start + tl.arange(0, BLOCK_IN)
        in_mask = in_cols < n_in
        offsets = out_cols.to(tl.int64)[:, None] * n_in + in_cols[None, :]
        mask = out_mask[:, None] & in_mask[None, :]
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
        x = tl.load(x_ptr + rows[:, None] * n_in + in_cols[None, :], mask=row_mask[:, None] & in_mask[None, :], other=0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if IS_GATED:
            up_weight = tl.load(weight_ptr + n_out.to(tl.int64) * n_in + offsets, mask=mask, other=0)
            up_acc = tl.dot(x, tl.trans(up_weight), up_acc, input_precision="ieee")
    acc *= scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + out_cols, mask=out_mask, other=0).to(tl.float32)[None, :]
    acc = apply_activation(acc, ACTIVATION)
    if IS_GATED:
        if HAS_BIAS:
            up_acc += tl.load(bias_ptr + n_out + out_cols, mask=out_mask, other=0).to(tl.float32)[None, :]
        acc *= up_acc
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * n_out + out_cols[None, :]
    mask = row_mask[:, None] & out_mask[None, :]
    if ADD_TO_OUTPUT:
        acc += tl.load(y_ptrs, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def decode_attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, y_ptr, splits_ptr, capacity, scale,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, D_HEAD: tl.constexpr, D_VALUE: tl.constexpr,
    IS_ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    N_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention for one head of one row.

    If N_SPLITS > 1, each program processes a split of the keys and writes its partial result to `splits_ptr`.
    """
    if USE_PDL:
        gdc_launch_dependents()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    max_score, exp_sum, acc = attend_to_split(
        qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, capacity, scale, row, head, split, True,
        N_HEADS, N_KV_HEADS, D_HEAD, D_VALUE, IS_ROTARY, BLOCK_D, BLOCK_VALUE, BLOCK_KEYS, N_SPLITS, USE_PDL,
    )  # fmt: skip
    value_cols = tl.arange(0, BLOCK_VALUE)
    if N_SPLITS == 1:
        y_ptrs = y_ptr + (row * N_HEADS + head) * D_VALUE + value_cols
        tl.store(y_ptrs, (acc / exp_sum).to(y_ptr.dtype.element_ty), mask=value_cols < D_VALUE)
    else:
        split_ptr = splits_ptr + ((row * N_HEADS + head) * N_SPLITS + split) * (BLOCK_VALUE + 2)
        tl.store(split_ptr + value_cols, acc)
        tl.store(split_ptr + BLOCK_VALUE, max_score)
        tl.store(split_ptr + BLOCK_VALUE + 1, exp_sum)


@triton.jit
def merge_attention_splits_kernel(
    splits_ptr, y_ptr, D_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, N_SPLITS: tl.constexpr, USE_PDL: tl.constexpr
):
    """Combine the partial results of each head and write the concatenated head outputs."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, value_cols = tl.program_id(0), tl.arange(0, BLOCK_VALUE)
    output = merge_splits(splits_ptr, head, BLOCK_VALUE, N_SPLITS)
    tl.store(y_ptr + head * D_VALUE + value_cols, output.to(y_ptr.dtype.element_ty), mask=value_cols < D_VALUE)


@triton.jit
def argmax_blocks_kernel(
    logits_ptr, block_max_ptr, block_argmax_ptr, block_exp_sum_ptr, vocab_size, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute the maximum, its first index and Σ exp(logit − maximum) for each block of logits in a row."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, block, n_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row.to(tl.int64) * vocab_size + token_ids, mask=token_ids < vocab_size, other=float("-inf")
    )
    block_max = tl.max(logits, 0)
    offset = row * n_blocks + block
    tl.store(block_max_ptr + offset, block_max)
    tl.store(block_argmax_ptr + offset, tl.min(tl.where(logits == block_max, token_ids, vocab_size), 0))
    tl.store(block_exp_sum_ptr + offset, tl.sum(tl.exp(logits - block_max), 0))


@triton.jit
def select_argmax_and_advance_kernel(
    block_max_ptr, block_argmax_ptr, block_exp_sum_ptr, ids_ptr, positions_ptr, steps_ptr, output_ids_ptr,
    output_log_p_ptr, vocab_size, n_blocks, last_position, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Select a row's most probable id as its next input, record the id and its log-probability, and advance the row."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, n_rows = tl.program_id(0), tl.num_programs(0)
    blocks = tl.arange(0, BLOCK)
    mask = blocks < n_blocks
    block_max = tl.load(block_max_ptr + row * n_blocks + blocks, mask=mask, other=float("-inf"))
    row_max = tl.max(block_max, 0)
    block_argmax = tl.load(block_argmax_ptr + row * n_blocks + blocks, mask=mask, other=0)
    # If all logits are NaN, no block equals the maximum. The id is then clamped, and the log-probability is NaN.
    token_id = tl.min(tl.where(mask & (block_max == row_max), block_argmax, vocab_size), 0)
    token_id = tl.minimum(token_id, vocab_size - 1)
    block_exp_sum = tl.load(block_exp_sum_ptr + row * n_blocks + blocks, mask=mask, other=0)
    exp_sum = tl.sum(block_exp_sum * tl.exp(block_max - row_max), 0)
    step = tl.load(steps_ptr + row)
    tl.store(output_ids_ptr + step * n_rows + row, token_id)
    tl.store(output_log_p_ptr + step * n_rows + row, -tl.log(exp_sum))
    tl.store(ids_ptr + row, token_id)
    tl.store(positions_ptr + row, tl.minimum(tl.load(positions_ptr + row) + 1, last_position))
    tl.store(steps_ptr + row, step + 1)
