"""Triton attention kernel for packed batches of short sequences.

All keys of a sequence fit into one block, so no partial results have to be merged. PyTorch's variable-length kernel
iterates over key blocks and keeps softmax statistics, which takes longer than reading and writing the tensors for short
sequences.
"""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from math import e, log2

import torch
import triton
from torch import Tensor
from triton import language as tl

QUERIES, WARPS = 64, 4
"""Number of queries and number of warps per program."""


@triton.jit
def short_varlen_attention_kernel(
    queries, keys, values, cu_seqlens, outputs, query_row, query_head, key_row, key_head, value_row, value_head,
    scale_log2,
    D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention from a block of queries in one head to all keys in their sequence.

    `scale_log2` includes the factor log₂(e) because the softmax uses powers of 2.
    """
    head, n_heads = tl.program_id(0), tl.num_programs(0)
    start = tl.load(cu_seqlens + tl.program_id(1)).to(tl.int64)
    n = tl.load(cu_seqlens + tl.program_id(1) + 1) - start
    query_positions = tl.program_id(2) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    key_positions, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, D)
    if tl.program_id(2) * BLOCK_QUERIES < n:
        is_query, is_key = (query_positions < n)[:, None], (key_positions < n)[:, None]
        query_pointers = queries + (start + query_positions)[:, None] * query_row + head * query_head + d[None, :]
        key_pointers = keys + (start + key_positions)[:, None] * key_row + head * key_head + d[None, :]
        value_pointers = values + (start + key_positions)[:, None] * value_row + head * value_head + d[None, :]
        query = tl.load(query_pointers, mask=is_query, other=0)
        key = tl.load(key_pointers, mask=is_key, other=0)
        value = tl.load(value_pointers, mask=is_key, other=0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        scores = tl.where((key_positions < n)[None, :], scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        result = tl.dot(weights.to(value.dtype), value, input_precision="ieee") / tl.sum(weights, 1)[:, None]
        output_pointers = outputs + ((start + query_positions)[:, None] * n_heads + head) * D + d[None, :]
        tl.store(output_pointers, result.to(outputs.dtype.element_ty), mask=is_query)


@torch.library.custom_op("qkv::short_varlen_attention", mutates_args=())
def short_varlen_attention(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute attention within each packed sequence. Inputs have shape (position, head, d_head).

    `d_head` must be a power of 2, and the last axis must be contiguous. For `cu_seqlens` and `max_seqlen`, see
    `Varlen`.
    """
    n, n_heads, width = queries.shape
    outputs = queries.new_empty(n, n_heads, width)
    strides = [part.stride(axis) for part in (queries, keys, values) for axis in (0, 1)]
    short_varlen_attention_kernel[(n_heads, len(cu_seqlens) - 1, triton.cdiv(max_seqlen, QUERIES))](
        queries, keys, values, cu_seqlens, outputs, *strides, width**-0.5 * log2(e), D=width,
        BLOCK_QUERIES=QUERIES, BLOCK_KEYS=max(16, triton.next_power_of_2(max_seqlen)), num_warps=WARPS,
    )  # fmt: skip
    return outputs


@short_varlen_attention.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:  # noqa: ARG001
    return queries.new_empty(queries.shape)
