"""How does a GPU attend within many short texts? In Triton: all keys of a text are one block, so nothing is merged.

torch's kernel for texts of unequal lengths goes over the keys in blocks and keeps statistics, which takes longer than
reading and writing the numbers themselves.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from math import e, log2

import torch
import triton
from torch import Tensor
from triton import language as tl

QUERIES, WARPS = 64, 4
"""Of a program."""


@triton.jit
def attend_text(
    queries, keys, values, starts, mixed, query_row, query_head, key_row, key_head, value_row, value_head, scale,
    D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Some queries of one head over all keys of their text. `scale` is for powers of 2."""
    head, n_heads = tl.program_id(0), tl.num_programs(0)
    start = tl.load(starts + tl.program_id(1)).to(tl.int64)
    n = tl.load(starts + tl.program_id(1) + 1) - start
    at = tl.program_id(2) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    keys_at, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, D)
    if tl.program_id(2) * BLOCK_QUERIES < n:
        is_query, is_key = (at < n)[:, None], (keys_at < n)[:, None]
        own = queries + (start + at)[:, None] * query_row + head * query_head + d[None, :]
        some_keys = keys + (start + keys_at)[:, None] * key_row + head * key_head + d[None, :]
        some_values = values + (start + keys_at)[:, None] * value_row + head * value_head + d[None, :]
        query = tl.load(own, mask=is_query, other=0)
        key = tl.load(some_keys, mask=is_key, other=0)
        value = tl.load(some_values, mask=is_key, other=0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((keys_at < n)[None, :], scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        result = tl.dot(weights.to(value.dtype), value, input_precision="ieee") / tl.sum(weights, 1)[:, None]
        to = mixed + ((start + at)[:, None] * n_heads + head) * D + d[None, :]
        tl.store(to, result.to(mixed.dtype.element_ty), mask=is_query)


@torch.library.custom_op("qkv::attend_short", mutates_args=())
def attend_short(queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:
    """(position, head, d_head) each, the last axis without gaps and a power of 2; `starts` and `longest`: `Packed`."""
    n, n_heads, width = queries.shape
    mixed = queries.new_empty(n, n_heads, width)
    strides = [part.stride(axis) for part in (queries, keys, values) for axis in (0, 1)]
    attend_text[(n_heads, len(starts) - 1, triton.cdiv(longest, QUERIES))](
        queries, keys, values, starts, mixed, *strides, width**-0.5 * log2(e), D=width,
        BLOCK_QUERIES=QUERIES, BLOCK_KEYS=max(16, triton.next_power_of_2(longest)), num_warps=WARPS,
    )  # fmt: skip
    return mixed


@attend_short.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, longest: int) -> Tensor:  # noqa: ARG001
    return queries.new_empty(queries.shape)
