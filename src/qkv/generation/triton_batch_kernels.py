"""The kernels of one decoding step on a GPU, in Triton: of several rows, and what choosing the next token takes.

With OVERLAP (on Hopper and newer) a kernel may begin before the one before it has ended; it waits before it touches
what the other writes. The residual stream is float32; weights, keys and values have the model's own type. `gpu_forward`
calls these in order; `gpu_row_kernels` has those of a step of one row.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qkv.generation.triton_functions import activated, embedded, looked, merged, normed, of_norm


@triton.jit
def embed(
    ids, positions, tokens, places, stream, n, scale, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """stream[row]: the token's row of the table, and its place's."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n
    x = embedded(ids, positions, tokens, places, row, columns, inside, n, scale, HAS_PLACES, OVERLAP)
    tl.store(stream + row * n + columns, x, mask=inside)


@triton.jit
def norm_rows(
    x, norm_weight, norm_bias, y, n, epsilon, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[row] = norm(x[row])."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weights, biases = of_norm(norm_weight, norm_bias, columns, inside, NORM, NORM_BIAS)
    if OVERLAP:
        gdc_wait()
    values = tl.load(x + row * n + columns, mask=inside, other=0).to(tl.float32)
    values = normed(values, inside, weights, biases, n, epsilon, NORM)
    tl.store(y + row * n + columns, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def many_rows(
    x, weight, bias, y, rows, n_in, n_out, scale, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = f(x·Wᵀ·scale + b), or added to y; gated: f of the first n_out outputs times the others."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    place = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    wanted, here = outs < n_out, place < rows
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    other = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, n_in, BLOCK_IN):
        ins = start + tl.arange(0, BLOCK_IN)
        inside = ins < n_in
        at = outs.to(tl.int64)[:, None] * n_in + ins[None, :]
        mask = wanted[:, None] & inside[None, :]
        weights = tl.load(weight + at, mask=mask, other=0)
        values = tl.load(x + place[:, None] * n_in + ins[None, :], mask=here[:, None] & inside[None, :], other=0)
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
        if GATED:
            more = tl.load(weight + n_out.to(tl.int64) * n_in + at, mask=mask, other=0)
            other = tl.dot(values, tl.trans(more), other, input_precision="ieee")
    total *= scale
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    if GATED:
        if HAS_BIAS:
            other += tl.load(bias + n_out + outs, mask=wanted, other=0).to(tl.float32)[None, :]
        total *= other
    to = y + place.to(tl.int64)[:, None] * n_out + outs[None, :]
    mask = here[:, None] & wanted[None, :]
    if ADD:
        total += tl.load(to, mask=mask, other=0).to(tl.float32)
    tl.store(to, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def look_back(
    projected, keys, values, positions, cos_table, sin_table, y, parts, capacity, scale, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_VALUE: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row. SPLITS > 1: each program takes a share of the keys and leaves what it found in `parts`."""
    if OVERLAP:
        gdc_launch_dependents()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    greatest, weight, total = looked(
        projected, keys, values, positions, cos_table, sin_table, capacity, scale, row, head, split, True, HEADS,
        KV_HEADS, D, D_VALUE, ROTARY, BLOCK_D, BLOCK_VALUE, BLOCK_KEYS, SPLITS, OVERLAP,
    )  # fmt: skip
    dv = tl.arange(0, BLOCK_VALUE)
    if SPLITS == 1:
        to = y + (row * HEADS + head) * D_VALUE + dv
        tl.store(to, (total / weight).to(y.dtype.element_ty), mask=dv < D_VALUE)
    else:
        part = parts + ((row * HEADS + head) * SPLITS + split) * (BLOCK_VALUE + 2)
        tl.store(part + dv, total)
        tl.store(part + BLOCK_VALUE, greatest)
        tl.store(part + BLOCK_VALUE + 1, weight)


@triton.jit
def merge(parts, y, D_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr):
    """The shares of all heads to their results, side by side."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head, dv = tl.program_id(0), tl.arange(0, BLOCK_VALUE)
    found = merged(parts, head, BLOCK_VALUE, SPLITS)
    tl.store(y + head * D_VALUE + dv, found.to(y.dtype.element_ty), mask=dv < D_VALUE)


@triton.jit
def best_of_blocks(logits, greatest, places, weights, n, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Of each block of a row's logits: the greatest, where it stands first, and Σ exp(logit − greatest)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, block, n_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    numbers = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * n + numbers, mask=numbers < n, other=float("-inf"))
    top = tl.max(values, 0)
    at = row * n_blocks + block
    tl.store(greatest + at, top)
    tl.store(places + at, tl.min(tl.where(values == top, numbers, n), 0))
    tl.store(weights + at, tl.sum(tl.exp(values - top), 0))


@triton.jit
def take_best(
    greatest, places, weights, ids, positions, steps, told_ids, told_log_p, n, n_blocks, last, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The likeliest id of a row becomes its next input; told with its log-probability; the row moves on by one."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, rows = tl.program_id(0), tl.num_programs(0)
    blocks = tl.arange(0, BLOCK)
    inside = blocks < n_blocks
    tops = tl.load(greatest + row * n_blocks + blocks, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    where = tl.load(places + row * n_blocks + blocks, mask=inside, other=0)
    # A row of NaN has no greatest: its log-probability tells.
    number = tl.minimum(tl.min(tl.where(inside & (tops == top), where, n), 0), n - 1)
    weight = tl.sum(tl.load(weights + row * n_blocks + blocks, mask=inside, other=0) * tl.exp(tops - top), 0)
    step = tl.load(steps + row)
    tl.store(told_ids + step * rows + row, number)
    tl.store(told_log_p + step * rows + row, -tl.log(weight))
    tl.store(ids + row, number)
    tl.store(positions + row, tl.minimum(tl.load(positions + row) + 1, last))
    tl.store(steps + row, step + 1)
