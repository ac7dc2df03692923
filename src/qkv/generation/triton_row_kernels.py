"""The kernels of a decoding step of one row on a GPU, in Triton: four a layer, for here every launch is waited for.

Each program reads its part of the weights before anything else, for these are what a step waits for; with OVERLAP it
does so while the kernel before is still at work. What a head found is multiplied on by whoever found it, so many
programs add to each number of the residual stream. It is held in whole numbers of 1 ÷ UNIT: their sum is the same in
whichever order they come. `spoiled` tells of numbers that have no place there: the row is no number from then on.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qkv.generation.triton_functions import activated, embedded, looked, merged, normed, of_norm

UNIT = tl.constexpr(2.0**36)
MOST_ADDED, MOST = tl.constexpr(2.0**20), tl.constexpr(2.0**26)
"""Of what is added at once, and of the stream where it is read. Whole numbers end at 2²⁷: to get there unseen, 64 heads
would have to add the most they can."""


@triton.jit
def _whole(x, spoiled, inside):
    """x in whole numbers, 0 for what is too large or no number."""
    fits = tl.abs(x) < MOST_ADDED
    tl.store(spoiled + tl.zeros_like(x).to(tl.int32), 1, mask=inside & ~fits)
    return (tl.where(fits, x, 0.0) * UNIT).to(tl.int64)


@triton.jit
def _read(stream, spoiled, columns, inside):
    x = tl.load(stream + columns, mask=inside, other=0).to(tl.float32) * (1 / UNIT)
    is_spoiled = (tl.load(spoiled) != 0) | (tl.abs(x) >= MOST)
    return tl.where(inside & is_spoiled, float("nan"), x)


@triton.jit
def embed_row(
    ids, positions, tokens, places, stream, spoiled, n, scale, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `embed`, of one row; nothing is spoiled yet."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n
    x = embedded(ids, positions, tokens, places, row, columns, inside, n, scale, HAS_PLACES, OVERLAP)
    tl.store(spoiled, 0)
    tl.debug_barrier()
    tl.store(stream + columns, _whole(x, spoiled, inside), mask=inside)


@triton.jit
def _weights(weight, bias, outs, ins, n_in, n_out, HAS_BIAS: tl.constexpr, GATED: tl.constexpr):
    """The matrix's rows of some outputs, and of what these are multiplied by; and the biases of both."""
    wanted = outs < n_out
    at = outs.to(tl.int64)[:, None] * n_in + ins[None, :]
    mask = wanted[:, None] & (ins < n_in)[None, :]
    weights = tl.load(weight + at, mask=mask, other=0)
    others = weights
    added = tl.zeros_like(outs).to(tl.float32)
    other = added
    if HAS_BIAS:
        added = tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)
    if GATED:
        others = tl.load(weight + n_out.to(tl.int64) * n_in + at, mask=mask, other=0)
        if HAS_BIAS:
            other = tl.load(bias + n_out + outs, mask=wanted, other=0).to(tl.float32)
    return weights, others, added, other


@triton.jit
def one_row(
    x, spoiled, weight, bias, norm_weight, norm_bias, y, n_in, n_out, epsilon, scale, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TURNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = f(norm(x)·Wᵀ·scale + b), x being the stream; gated: f of the first n_out outputs times the others.

    ADD: x is a row as it is, and the result goes onto y, which is the stream. The weights of a turn are read while the
    turn before it is worked on, those of the first before anything else.
    """
    if OVERLAP:
        gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    inside = ins < n_in
    weights, others, added, other = _weights(weight, bias, outs, ins, n_in, n_out, HAS_BIAS, GATED)
    norm_weights, norm_biases = of_norm(norm_weight, norm_bias, ins, inside, NORM, NORM_BIAS)
    if OVERLAP:
        gdc_wait()
    row = tl.load(x + ins, mask=inside, other=0).to(tl.float32) if ADD else _read(x, spoiled, ins, inside)
    row = normed(row, inside, norm_weights, norm_biases, n_in, epsilon, NORM)
    for _ in range(TURNS):
        following = outs + tl.num_programs(0) * BLOCK_OUT
        if TURNS > 1:
            coming = _weights(weight, bias, following, ins, n_in, n_out, HAS_BIAS, GATED)
        wanted = outs < n_out
        if ADD:
            before = tl.load(y + outs, mask=wanted, other=0)
        result = activated(tl.sum(weights.to(tl.float32) * row[None, :], 1) * scale + added, ACTIVATION)
        if GATED:
            result *= tl.sum(others.to(tl.float32) * row[None, :], 1) + other
        if ADD:
            tl.store(y + outs, before + _whole(result, spoiled, wanted), mask=wanted)
        else:
            tl.store(y + outs, result.to(y.dtype.element_ty), mask=wanted)
        outs = following
        if TURNS > 1:
            weights, others, added, other = coming


@triton.jit
def give_heads(
    projected, keys, values, positions, cos_table, sin_table, parts, weight, bias, stream, spoiled, capacity, scale,
    n_out, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_VALUE: tl.constexpr, ROTARY: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What a head found, times its part of the output's matrix, onto the stream.

    SPLITS == 1: each program looks back for itself. SPLITS > 1: `look_back` did, and left its shares in `parts`.
    """
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    dv = tl.arange(0, BLOCK_VALUE)
    wanted = outs < n_out
    at = outs.to(tl.int64)[:, None] * (HEADS * D_VALUE) + head * D_VALUE + dv[None, :]
    weights = tl.load(weight + at, mask=wanted[:, None] & (dv < D_VALUE)[None, :], other=0)
    added = tl.zeros((BLOCK_OUT,), tl.float32)
    if HAS_BIAS:  # noqa: SIM102 - the one is known when compiled, the other is not
        if head == 0:
            added = tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)
    if SPLITS == 1:
        row = tl.program_id(2)  # 0: there is one row, and the grid has no third axis
        _, mass, total = looked(
            projected, keys, values, positions, cos_table, sin_table, capacity, scale, row, head, 0,
            tl.program_id(1) == 0, HEADS, KV_HEADS, D, D_VALUE, ROTARY, BLOCK_D, BLOCK_VALUE, BLOCK_KEYS, SPLITS,
            OVERLAP,
        )  # fmt: skip
        found = total / mass
    else:
        if OVERLAP:
            gdc_wait()
        found = merged(parts, head, BLOCK_VALUE, SPLITS)
    result = tl.sum(weights.to(tl.float32) * found[None, :], 1) + added
    tl.atomic_add(stream + outs, _whole(result, spoiled, wanted), mask=wanted, sem="relaxed")
