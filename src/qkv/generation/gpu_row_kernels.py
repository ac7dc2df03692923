"""The kernels of a decoding step of one row on a GPU, in Triton: three a layer, for here every launch is waited for.

Each program reads its part of the weights before anything else, for these are what a step waits for; with OVERLAP it
does so while the kernel before is still at work. Heads and hidden numbers are multiplied on by whoever found them, so
many programs add to each number of the residual stream. It is held in whole numbers of 1 ÷ UNIT: their sum is the same
in whichever order they come. `spoiled` tells of numbers that have no place there: the row is no number from then on.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qkv.generation.gpu_kernel_parts import activated, looked, merged, normed

UNIT = tl.constexpr(2.0**36)
MOST = tl.constexpr(2.0**26)


@triton.jit
def _whole(x, spoiled, inside):
    """x in whole numbers, 0 for what is too large or no number."""
    fits = tl.abs(x) < MOST
    tl.store(spoiled + tl.zeros_like(x).to(tl.int32), 1, mask=inside & ~fits)
    return (tl.where(fits, x, 0.0) * UNIT).to(tl.int64)


@triton.jit
def _read(stream, spoiled, columns, inside):
    x = tl.load(stream + columns, mask=inside, other=0).to(tl.float32) * (1 / UNIT)
    return tl.where(inside & (tl.load(spoiled) != 0), float("nan"), x)


@triton.jit
def embed_row(
    ids, positions, tokens, places, stream, spoiled, n, scale, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """stream = tokens[id]·scale + places[position]; nothing is spoiled yet."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(tokens + tl.load(ids) * n + columns, mask=inside, other=0).to(tl.float32) * scale
    if HAS_PLACES:
        x += tl.load(places + tl.load(positions) * n + columns, mask=inside, other=0).to(tl.float32)
    tl.store(spoiled, 0)
    tl.debug_barrier()
    tl.store(stream + columns, _whole(x, spoiled, inside), mask=inside)


@triton.jit
def project(
    stream, copy, spoiled, weight, bias, norm_weight, norm_bias, y, n_in, n_out, epsilon, scale, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, COPIES: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y = norm(stream)·Wᵀ·scale + b; the stream is copied for those who will read it while others add to it."""
    if OVERLAP:
        gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    inside, wanted = ins < n_in, outs < n_out
    mask = wanted[:, None] & inside[None, :]
    weights = tl.load(weight + outs.to(tl.int64)[:, None] * n_in + ins[None, :], mask=mask, other=0)
    if OVERLAP:
        gdc_wait()
    if COPIES:  # noqa: SIM102 - the one is known when compiled, the other is not
        if tl.program_id(0) == 0:
            tl.store(copy + ins, tl.load(stream + ins, mask=inside, other=0), mask=inside)
    row = _read(stream, spoiled, ins, inside)
    row = normed(row, ins, inside, norm_weight, norm_bias, n_in, epsilon, NORM, NORM_BIAS)
    result = tl.sum(weights.to(tl.float32) * row[None, :], 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)
    tl.store(y + outs, result.to(y.dtype.element_ty), mask=wanted)


@triton.jit
def give_heads(
    projected, keys, values, positions, cos_table, sin_table, parts, weight, bias, stream, copy, spoiled, capacity,
    scale, n_out, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_VALUE: tl.constexpr,
    ROTARY: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What a head found, times its part of the output's matrix, onto the stream and its copy.

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
    if OVERLAP:
        gdc_wait()
    if SPLITS == 1:
        _, mass, total = looked(
            projected, keys, values, positions, cos_table, sin_table, capacity, scale, tl.program_id(2), head, 0,
            tl.program_id(1) == 0, HEADS, KV_HEADS, D, D_VALUE, ROTARY, BLOCK_D, BLOCK_VALUE, BLOCK_KEYS, SPLITS,
        )  # fmt: skip
        found = total / mass
    else:
        found = merged(parts, head, BLOCK_VALUE, SPLITS)
    result = tl.sum(weights.to(tl.float32) * found[None, :], 1)
    if HAS_BIAS:  # noqa: SIM102
        if head == 0:
            result += tl.load(bias + outs, mask=wanted, other=0).to(tl.float32)
    result = _whole(result, spoiled, wanted)
    tl.atomic_add(stream + outs, result, mask=wanted, sem="relaxed")
    tl.atomic_add(copy + outs, result, mask=wanted, sem="relaxed")


@triton.jit
def _hidden_weights(expand, contract, hidden, columns, n, n_hidden, GATED: tl.constexpr):
    """The rows of some hidden numbers: of what they are made with, of what gates it, of what they are given on with."""
    at = hidden.to(tl.int64)[:, None] * n + columns[None, :]
    mask = (hidden < n_hidden)[:, None] & (columns < n)[None, :]
    made = tl.load(expand + at, mask=mask, other=0)
    given = tl.load(contract + at, mask=mask, other=0)
    gated = made
    if GATED:
        gated = tl.load(expand + n_hidden.to(tl.int64) * n + at, mask=mask, other=0)
    return made, gated, given


@triton.jit
def feed_forward(
    copy, spoiled, expand, expand_bias, contract, contract_bias, norm_weight, norm_bias, stream, n, n_hidden, epsilon,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, GIVES_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    TURNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some hidden numbers of norm(copy), and what they give, onto the stream; `contract` has a row for each of them.

    The weights of a turn are read while the turn before it is worked on, those of the first before anything else.
    """
    if OVERLAP:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    hidden = tl.program_id(0) * (TURNS * BLOCK_HIDDEN) + tl.arange(0, BLOCK_HIDDEN)
    made, gated, given = _hidden_weights(expand, contract, hidden, columns, n, n_hidden, GATED)
    if OVERLAP:
        gdc_wait()
    row = _read(copy, spoiled, columns, inside)
    row = normed(row, columns, inside, norm_weight, norm_bias, n, epsilon, NORM, NORM_BIAS)
    total = tl.zeros((BLOCK,), tl.float32)
    if GIVES_BIAS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            total += tl.load(contract_bias + columns, mask=inside, other=0).to(tl.float32)
    for turn in tl.static_range(TURNS):
        following = hidden + BLOCK_HIDDEN
        if turn + 1 < TURNS:
            next_made, next_gated, next_given = _hidden_weights(
                expand, contract, following, columns, n, n_hidden, GATED
            )
        exists = hidden < n_hidden
        found = tl.sum(made.to(tl.float32) * row[None, :], 1)
        if HAS_BIAS:
            found += tl.load(expand_bias + hidden, mask=exists, other=0).to(tl.float32)
        found = activated(found, ACTIVATION)
        if GATED:
            other = tl.sum(gated.to(tl.float32) * row[None, :], 1)
            if HAS_BIAS:
                other += tl.load(expand_bias + n_hidden + hidden, mask=exists, other=0).to(tl.float32)
            found *= other
        total += tl.sum(found[:, None] * given.to(tl.float32), 0)
        hidden = following
        if turn + 1 < TURNS:
            made, gated, given = next_made, next_gated, next_given
    tl.atomic_add(stream + columns, _whole(total, spoiled, inside), mask=inside, sem="relaxed")
