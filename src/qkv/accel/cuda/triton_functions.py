"""Triton device functions shared by several kernels: embedding, norms, activations and single-query attention."""
# pyright: basic, reportMissingImports=false, reportPossiblyUnboundVariable=false

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed_token(
    ids_ptr, positions_ptr, token_embedding_ptr, position_embedding_ptr, row, cols, mask, d_model, scale,
    HAS_POSITION_EMBEDDING: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Load token_embedding[ids[row]] · scale + position_embedding[positions[row]].

    This kernel waits before it lets the next kernel start. All later kernels can therefore assume that the previous
    decode step has finished.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    token_id = tl.load(ids_ptr + row)
    x = tl.load(token_embedding_ptr + token_id * d_model + cols, mask=mask, other=0).to(tl.float32) * scale
    if HAS_POSITION_EMBEDDING:
        position = tl.load(positions_ptr + row)
        x += tl.load(position_embedding_ptr + position * d_model + cols, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def load_norm_parameters(weight_ptr, bias_ptr, cols, mask, NORM_KIND: tl.constexpr, HAS_NORM_BIAS: tl.constexpr):
    """Load the weight and bias of a norm. This function can be called before the norm's input is available."""
    weight = tl.zeros_like(cols).to(tl.float32)
    bias = weight
    if NORM_KIND > 0:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0).to(tl.float32)
        if HAS_NORM_BIAS:
            bias = tl.load(bias_ptr + cols, mask=mask, other=0).to(tl.float32)
    return weight, bias


@triton.jit
def normalize(x, mask, weight, bias, n, eps, NORM_KIND: tl.constexpr):
    """Apply a norm to a row. NORM_KIND: 0 none, 1 LayerNorm, 2 RMSNorm. `x` must be 0 where `mask` is false."""
    if NORM_KIND == 1:
        x = tl.where(mask, x - tl.sum(x, 0) / n, 0.0)
    if NORM_KIND > 0:
        x = x * (1 / tl.sqrt(tl.sum(x * x, 0) / n + eps)) * weight + bias
    return x


@triton.jit
def apply_activation(x, ACTIVATION: tl.constexpr):
    """Apply an activation. ACTIVATION: 0 none, 1 ReLU, 2 GELU, 3 GELU with tanh, 4 SiLU."""
    if ACTIVATION == 1:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # x · sigmoid(2 · inner) equals 0.5 · x · (1 + tanh(inner)).
        x = x * tl.sigmoid(2 * inner)
    elif ACTIVATION == 4:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _load_rotated(ptr, cols, mask, cos_ptr, sin_ptr, position, D_HEAD: tl.constexpr, IS_ROTARY: tl.constexpr):
    """Load the query or key of a head and apply the rotary embedding of `position`."""
    x = tl.load(ptr + cols, mask=mask, other=0).to(tl.float32)
    if IS_ROTARY:
        is_first_half = cols < D_HEAD // 2
        partner_cols = tl.where(is_first_half, cols + D_HEAD // 2, cols - D_HEAD // 2)
        partner = tl.load(ptr + partner_cols, mask=mask, other=0)
        x *= tl.load(cos_ptr + position * D_HEAD + cols, mask=mask, other=0)
        sin = tl.load(sin_ptr + position * D_HEAD + cols, mask=mask, other=0)
        x += tl.where(is_first_half, -1.0, 1.0) * partner.to(tl.float32) * sin
    return x


@triton.jit
def _load_keys_and_values(
    keys_ptr, values_ptr, first_slot, slots, end, D_HEAD: tl.constexpr, D_VALUE: tl.constexpr, key_cols, value_cols
):
    """Load the cached keys and values in `slots`. Slots at or beyond `end` are loaded as 0."""
    offsets, is_filled = (first_slot + slots)[:, None], (slots < end)[:, None]
    keys = tl.load(
        keys_ptr + offsets * D_HEAD + key_cols[None, :], mask=is_filled & (key_cols < D_HEAD)[None, :], other=0
    )
    values = tl.load(
        values_ptr + offsets * D_VALUE + value_cols[None, :], mask=is_filled & (value_cols < D_VALUE)[None, :], other=0
    )
    return keys, values


@triton.jit
def attend_to_split(
    qkv_ptr, keys_ptr, values_ptr, positions_ptr, cos_ptr, sin_ptr, capacity, scale, row, head, split, writes_cache,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, D_HEAD: tl.constexpr, D_VALUE: tl.constexpr,
    IS_ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    N_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention for one head of one row over a split of the keys, with an online softmax.

    Returns the maximum score, the sum of exp(score − maximum), and the values weighted by exp(score − maximum). The
    first split also contains the new key and value, and writes them to the cache if `writes_cache` is true. The
    position and the cached keys are results of earlier decode steps, which have finished. They are therefore loaded
    before waiting for the previous kernel.
    """
    group_size: tl.constexpr = N_HEADS // N_KV_HEADS
    kv_head = head // group_size
    position = tl.load(positions_ptr + row)
    key_cols, value_cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_VALUE)
    key_mask, value_mask = key_cols < D_HEAD, value_cols < D_VALUE
    first_slot = (row.to(tl.int64) * N_KV_HEADS + kv_head) * capacity
    split_size = tl.cdiv(tl.cdiv(position, N_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start, end = split * split_size, tl.minimum((split + 1) * split_size, position)
    slots = start + tl.arange(0, BLOCK_KEYS)
    keys, values = _load_keys_and_values(
        keys_ptr, values_ptr, first_slot, slots, end, D_HEAD, D_VALUE, key_cols, value_cols
    )
    if USE_PDL:
        gdc_wait()
    row_ptr = qkv_ptr + row * ((N_HEADS + N_KV_HEADS) * D_HEAD + N_KV_HEADS * D_VALUE)
    query = _load_rotated(row_ptr + head * D_HEAD, key_cols, key_mask, cos_ptr, sin_ptr, position, D_HEAD, IS_ROTARY)
    max_score, exp_sum = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_VALUE,), tl.float32)
    if split == 0:
        new_key = _load_rotated(
            row_ptr + (N_HEADS + kv_head) * D_HEAD, key_cols, key_mask, cos_ptr, sin_ptr, position, D_HEAD, IS_ROTARY
        ).to(keys_ptr.dtype.element_ty)
        new_value = tl.load(
            row_ptr + (N_HEADS + N_KV_HEADS) * D_HEAD + kv_head * D_VALUE + value_cols, mask=value_mask, other=0
        )
        if writes_cache and head % group_size == 0:
            tl.store(keys_ptr + (first_slot + position) * D_HEAD + key_cols, new_key, mask=key_mask)
            tl.store(
                values_ptr + (first_slot + position) * D_VALUE + value_cols,
                new_value.to(values_ptr.dtype.element_ty),
                mask=value_mask,
            )
        max_score = tl.sum(query * new_key.to(tl.float32), 0) * scale
        exp_sum += 1
        acc += new_value.to(tl.float32)
    for _ in range(start, end, BLOCK_KEYS):
        scores = tl.sum(query[None, :] * keys.to(tl.float32), 1) * scale
        scores = tl.where(slots < end, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 0))
        exps, rescale = tl.exp(scores - new_max), tl.exp(max_score - new_max)
        exp_sum = exp_sum * rescale + tl.sum(exps, 0)
        acc = acc * rescale + tl.sum(exps[:, None] * values.to(tl.float32), 0)
        max_score = new_max
        slots += BLOCK_KEYS
        keys, values = _load_keys_and_values(
            keys_ptr, values_ptr, first_slot, slots, end, D_HEAD, D_VALUE, key_cols, value_cols
        )
    return max_score, exp_sum, acc


@triton.jit
def merge_splits(splits_ptr, head, BLOCK_VALUE: tl.constexpr, N_SPLITS: tl.constexpr):
    """Combine the partial results of all splits into the attention output of a head.

    Each split has BLOCK_VALUE weighted values, followed by the maximum score and the sum of exponentials.
    """
    value_cols, splits = tl.arange(0, BLOCK_VALUE), tl.arange(0, N_SPLITS)
    split_ptrs = splits_ptr + (head * N_SPLITS + splits) * (BLOCK_VALUE + 2)
    max_scores = tl.load(split_ptrs + BLOCK_VALUE)
    rescale = tl.exp(max_scores - tl.max(max_scores, 0))
    exp_sum = tl.sum(tl.load(split_ptrs + BLOCK_VALUE + 1) * rescale, 0)
    return tl.sum(tl.load(split_ptrs[:, None] + value_cols[None, :]) * rescale[:, None], 0) / exp_sum
