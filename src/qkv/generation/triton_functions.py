"""What kernels of several files do inside, in Triton: a norm, an activation, looking back at the keys."""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embedded(
    ids, positions, tokens, places, row, columns, inside, n, scale, HAS_PLACES: tl.constexpr, OVERLAP: tl.constexpr
):
    """tokens[ids[row]]·scale + places[positions[row]].

    It waits first: whoever begins after it knows that the step before has ended.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(tokens + tl.load(ids + row) * n + columns, mask=inside, other=0).to(tl.float32) * scale
    if HAS_PLACES:
        x += tl.load(places + tl.load(positions + row) * n + columns, mask=inside, other=0).to(tl.float32)
    return x


@triton.jit
def of_norm(weight, bias, columns, inside, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A norm's weights and biases, to be read before what is normed is there."""
    weights = tl.zeros_like(columns).to(tl.float32)
    biases = weights
    if NORM > 0:
        weights = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
        if HAS_BIAS:
            biases = tl.load(bias + columns, mask=inside, other=0).to(tl.float32)
    return weights, biases


@triton.jit
def normed(x, inside, weights, biases, n, epsilon, NORM: tl.constexpr):
    """NORM: 0 none, 1 LayerNorm, 2 RMSNorm. x is 0 outside."""
    if NORM == 1:
        x = tl.where(inside, x - tl.sum(x, 0) / n, 0.0)
    if NORM > 0:
        x = x * (1 / tl.sqrt(tl.sum(x * x, 0) / n + epsilon)) * weights + biases
    return x


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
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
def _kept(keys, values, first, slots, end, D: tl.constexpr, D_VALUE: tl.constexpr, d, dv):
    """Keys and values of some slots, 0 from `end` on."""
    at, seen = (first + slots)[:, None], (slots < end)[:, None]
    some_keys = tl.load(keys + at * D + d[None, :], mask=seen & (d < D)[None, :], other=0)
    return some_keys, tl.load(values + at * D_VALUE + dv[None, :], mask=seen & (dv < D_VALUE)[None, :], other=0)


@triton.jit
def looked(
    projected, keys, values, positions, cos_table, sin_table, capacity, scale, row, head, split, writes,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_VALUE: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one row over its share of the keys: the greatest score, the weights' sum, the values' weighted sum.

    The first share has the new key and value, and writes them to their slot where it is told to. Position and old keys
    are those of the steps before, which have ended: they are read before the kernel before this one has.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    kv = head // group
    n = tl.load(positions + row)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_VALUE)
    in_d, in_dv = d < D, dv < D_VALUE
    first = (row.to(tl.int64) * KV_HEADS + kv) * capacity
    share = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start, end = split * share, tl.minimum((split + 1) * share, n)
    slots = start + tl.arange(0, BLOCK_KEYS)
    some_keys, some_values = _kept(keys, values, first, slots, end, D, D_VALUE, d, dv)
    if OVERLAP:
        gdc_wait()
    here = projected + row * ((HEADS + KV_HEADS) * D + KV_HEADS * D_VALUE)
    query = _turned(here + head * D, d, in_d, cos_table, sin_table, n, D, ROTARY)
    greatest, weight = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    total = tl.zeros((BLOCK_VALUE,), tl.float32)
    if split == 0:
        key = _turned(here + (HEADS + kv) * D, d, in_d, cos_table, sin_table, n, D, ROTARY).to(keys.dtype.element_ty)
        value = tl.load(here + (HEADS + KV_HEADS) * D + kv * D_VALUE + dv, mask=in_dv, other=0)
        if writes and head % group == 0:
            tl.store(keys + (first + n) * D + d, key, mask=in_d)
            tl.store(values + (first + n) * D_VALUE + dv, value.to(values.dtype.element_ty), mask=in_dv)
        greatest = tl.sum(query * key.to(tl.float32), 0) * scale
        weight += 1
        total += value.to(tl.float32)
    for _ in range(start, end, BLOCK_KEYS):
        scores = tl.sum(query[None, :] * some_keys.to(tl.float32), 1) * scale
        scores = tl.where(slots < end, scores, float("-inf"))
        now = tl.maximum(greatest, tl.max(scores, 0))
        exps, kept = tl.exp(scores - now), tl.exp(greatest - now)
        weight = weight * kept + tl.sum(exps, 0)
        total = total * kept + tl.sum(exps[:, None] * some_values.to(tl.float32), 0)
        greatest = now
        slots += BLOCK_KEYS
        some_keys, some_values = _kept(keys, values, first, slots, end, D, D_VALUE, d, dv)
    return greatest, weight, total


@triton.jit
def merged(parts, head, BLOCK_VALUE: tl.constexpr, SPLITS: tl.constexpr):
    """What the programs of a head left, as one result."""
    dv, splits = tl.arange(0, BLOCK_VALUE), tl.arange(0, SPLITS)
    part = parts + (head * SPLITS + splits) * (BLOCK_VALUE + 2)
    greatest = tl.load(part + BLOCK_VALUE)
    kept = tl.exp(greatest - tl.max(greatest, 0))
    weight = tl.sum(tl.load(part + BLOCK_VALUE + 1) * kept, 0)
    return tl.sum(tl.load(part[:, None] + dv[None, :]) * kept[:, None], 0) / weight
