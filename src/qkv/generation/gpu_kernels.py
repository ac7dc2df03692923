"""The kernels of one decoding step on a GPU, in Triton: a layer is five of them where one text is written.

Each program reads its part of the weights before anything else, for these are what a step waits for. With OVERLAP (on
Hopper and newer) a kernel may begin before the one before it has ended: it reads weights, and waits before it touches
what the other writes. The residual stream is float32; weights, keys and values have the model's own type. `gpu_step`
calls these in order.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed(
    ids, positions, tokens, places, stream, n, scale, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """stream[row] = tokens[ids[row]]·scale + places[positions[row]]."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    number = tl.load(ids + row)
    x = tl.load(tokens + number * n + columns, mask=inside, other=0).to(tl.float32) * scale
    if HAS_PLACES:
        position = tl.load(positions + row)
        x += tl.load(places + position * n + columns, mask=inside, other=0).to(tl.float32)
    tl.store(stream + row * n + columns, x, mask=inside)


@triton.jit
def _normed(x, columns, inside, weight, bias, n, epsilon, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """NORM: 0 none, 1 LayerNorm, 2 RMSNorm. x is 0 outside."""
    if NORM == 1:
        x = tl.where(inside, x - tl.sum(x, 0) / n, 0.0)
    if NORM > 0:
        x = x * (1 / tl.sqrt(tl.sum(x * x, 0) / n + epsilon))
        x = x * tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=inside, other=0).to(tl.float32)
    return x


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """0 none, 1 ReLU, 2 GELU, 3 GELU by tanh, 4 SiLU."""
    if ACTIVATION == 1:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2 * inner)
    elif ACTIVATION == 4:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def one_row(
    x, weight, bias, norm_weight, norm_bias, y, n_in, n_out, epsilon, scale, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = f(norm(x)·Wᵀ·scale + b), or added to y; gated: f of the first n_out outputs times the others."""
    if OVERLAP:
        gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    inside, wanted = ins < n_in, outs < n_out
    at = outs.to(tl.int64)[:, None] * n_in + ins[None, :]
    mask = wanted[:, None] & inside[None, :]
    weights = tl.load(weight + at, mask=mask, other=0)
    if GATED:
        others = tl.load(weight + n_out.to(tl.int64) * n_in + at, mask=mask, other=0)
    if OVERLAP:
        gdc_wait()
    row = tl.load(x + ins, mask=inside, other=0).to(tl.float32)
    row = _normed(row, ins, inside, norm_weight, norm_bias, n_in, epsilon, NORM, NORM_BIAS)
    result = tl.sum(weights.to(tl.float32) * row[None, :], 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)
    result = _activated(result, ACTIVATION)
    if GATED:
        other = tl.sum(others.to(tl.float32) * row[None, :], 1)
        if HAS_BIAS:
            other += tl.load(bias + n_out + outs, mask=wanted, other=0).to(tl.float32)
        result *= other
    if ADD:
        result += tl.load(y + outs, mask=wanted, other=0).to(tl.float32)
    tl.store(y + outs, result.to(y.dtype.element_ty), mask=wanted)


@triton.jit
def norm_rows(
    x, norm_weight, norm_bias, y, n, epsilon, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[row] = norm(x[row])."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    values = tl.load(x + row * n + columns, mask=inside, other=0).to(tl.float32)
    values = _normed(values, columns, inside, norm_weight, norm_bias, n, epsilon, NORM, NORM_BIAS)
    tl.store(y + row * n + columns, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def many_rows(
    x, weight, bias, y, rows, n_in, n_out, scale, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `one_row`, without the norm, for a block of rows."""
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
    total = _activated(total, ACTIVATION)
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
def _turned(at, columns, inside, cos, sin, n, D: tl.constexpr, ROTARY: tl.constexpr):
    """What stands `at`, turned by the angles of position n."""
    x = tl.load(at + columns, mask=inside, other=0).to(tl.float32)
    if ROTARY:
        is_first = columns < D // 2
        partner = tl.load(at + tl.where(is_first, columns + D // 2, columns - D // 2), mask=inside, other=0)
        x *= tl.load(cos + n * D + columns, mask=inside, other=0)
        sine = tl.load(sin + n * D + columns, mask=inside, other=0)
        x += tl.where(is_first, -1.0, 1.0) * partner.to(tl.float32) * sine
    return x


@triton.jit
def look_back(
    projected, keys, values, positions, cos_table, sin_table, y, parts, capacity, scale, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_VALUE: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row over its keys; the new key and value are written to their slot on the way.

    SPLITS > 1: each program takes a share of the keys and leaves its sum, greatest score and weight in `parts`.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    kv = head // group
    n = tl.load(positions + row)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_VALUE)
    in_d, in_dv = d < D, dv < D_VALUE
    here = projected + row * ((HEADS + KV_HEADS) * D + KV_HEADS * D_VALUE)
    query = _turned(here + head * D, d, in_d, cos_table, sin_table, n, D, ROTARY)
    first = (row.to(tl.int64) * KV_HEADS + kv) * capacity
    greatest, weight = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    total = tl.zeros((BLOCK_VALUE,), tl.float32)
    if split == 0:
        key = _turned(here + (HEADS + kv) * D, d, in_d, cos_table, sin_table, n, D, ROTARY).to(keys.dtype.element_ty)
        value = tl.load(here + (HEADS + KV_HEADS) * D + kv * D_VALUE + dv, mask=in_dv, other=0)
        if head % group == 0:
            tl.store(keys + (first + n) * D + d, key, mask=in_d)
            tl.store(values + (first + n) * D_VALUE + dv, value.to(values.dtype.element_ty), mask=in_dv)
        greatest = tl.sum(query * key.to(tl.float32), 0) * scale
        weight += 1
        total += value.to(tl.float32)
    share = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    end = tl.minimum((split + 1) * share, n)
    for start in range(split * share, end, BLOCK_KEYS):
        slots = start + tl.arange(0, BLOCK_KEYS)
        seen = slots < end
        at = first + slots
        some_keys = tl.load(keys + at[:, None] * D + d[None, :], mask=seen[:, None] & in_d[None, :], other=0)
        some_values = tl.load(
            values + at[:, None] * D_VALUE + dv[None, :], mask=seen[:, None] & in_dv[None, :], other=0
        )
        scores = tl.where(seen, tl.sum(query[None, :] * some_keys.to(tl.float32), 1) * scale, float("-inf"))
        now = tl.maximum(greatest, tl.max(scores, 0))
        exps, kept = tl.exp(scores - now), tl.exp(greatest - now)
        weight = weight * kept + tl.sum(exps, 0)
        total = total * kept + tl.sum(exps[:, None] * some_values.to(tl.float32), 0)
        greatest = now
    if SPLITS == 1:
        to = y + (row * HEADS + head) * D_VALUE + dv
        tl.store(to, (total / weight).to(y.dtype.element_ty), mask=in_dv)
    else:
        part = parts + ((row * HEADS + head) * SPLITS + split) * (BLOCK_VALUE + 2)
        tl.store(part + dv, total)
        tl.store(part + BLOCK_VALUE, greatest)
        tl.store(part + BLOCK_VALUE + 1, weight)


@triton.jit
def merge(parts, y, D_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr):
    """The programs' shares of a head to one result."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    dv, splits = tl.arange(0, BLOCK_VALUE), tl.arange(0, SPLITS)
    part = parts + (head * SPLITS + splits) * (BLOCK_VALUE + 2)
    greatest = tl.load(part + BLOCK_VALUE)
    kept = tl.exp(greatest - tl.max(greatest, 0))
    weight = tl.sum(tl.load(part + BLOCK_VALUE + 1) * kept, 0)
    total = tl.sum(tl.load(part[:, None] + dv[None, :]) * kept[:, None], 0)
    tl.store(y + head * D_VALUE + dv, (total / weight).to(y.dtype.element_ty), mask=dv < D_VALUE)


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
