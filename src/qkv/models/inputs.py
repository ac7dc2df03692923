"""Create position ids and masks and check the inputs of all Transformer models."""

import torch
from torch import Tensor

from qkv.errors import ConfigError, ContextLengthError, InputError, ShapeError
from qkv.nn import KVCache, Mask, Source
from qkv.tensors import AttentionMask, Ids, Patches, Positions


def position_ids_reserving_cache(
    ids: Ids | Patches,
    *,
    attention_mask: AttentionMask | None = None,
    documents: Ids | None = None,
    cache: KVCache | None = None,
) -> Positions:
    """Return the position of each token, and reserve cache slots for the tokens if a cache is passed.

    Padding does not count as a position, and the positions of each packed document start at 0. With a cache, positions
    continue after the cached tokens.
    """
    check_attention_mask(attention_mask, ids)
    check_matches_ids("documents", documents, ids)
    if cache is not None:
        if documents is not None:
            raise ConfigError("documents cannot be combined with a cache")
        return cache.reserve(batch=ids.shape[0], n_new=ids.shape[1], attention_mask=attention_mask)
    if attention_mask is None:
        n_before = torch.arange(ids.shape[1], device=ids.device)[None]
    else:
        n_before = attention_mask.long().cumsum(1) - attention_mask.long()
    return n_before if documents is None else n_before - _document_offsets(documents, n_before)


def _document_offsets(documents: Tensor, n_before: Tensor) -> Tensor:
    """Return, for each position, the number of tokens that precede its document."""
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (n_before * is_start).cummax(1).values


def check_matches_ids(name: str, tensor: Tensor | None, ids: Ids | Patches) -> None:
    if tensor is not None and tensor.shape != ids.shape[:2]:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, but ids have shape {tuple(ids.shape[:2])}")


def check_attention_mask(attention_mask: Tensor | None, ids: Ids | Patches) -> None:
    """Raise an error if the mask does not match the ids or is not boolean.

    A mask of 0s and 1s is rejected because it would be added to the scores.
    """
    check_matches_ids("attention_mask", attention_mask, ids)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise InputError(
            f"attention_mask must have dtype torch.bool (True for real tokens), got {attention_mask.dtype}"
        )


def check_rows_multiple_of_sources(ids: Ids, source: Source) -> None:
    n_rows, n_sources = ids.shape[0], source.states.shape[0]
    if n_rows % n_sources:
        raise ShapeError(
            f"the number of rows of ids must be a multiple of the number of sources, "
            f"got {n_rows} rows and {n_sources} sources"
        )


def build_mask(
    positions: Positions,
    *,
    causal: bool,
    sliding_window: int | None,
    attention_mask: AttentionMask | None,
    documents: Ids | None = None,
) -> Mask | None:
    """Build the mask for a forward pass without a cache. Return `None` if every key is visible."""
    if not causal and sliding_window is None and attention_mask is None and documents is None:
        return None
    # With padding between tokens, a sliding window counts only real tokens, as it does with a cache.
    token_positions = positions if sliding_window is not None and attention_mask is not None else None
    return Mask(
        causal=causal,
        sliding_window=sliding_window,
        key_padding_mask=attention_mask,
        documents=documents,
        query_positions=token_positions,
        key_positions=token_positions,
    )


def build_causal_mask(
    positions: Positions,
    *,
    sliding_window: int | None,
    attention_mask: AttentionMask | None,
    documents: Ids | None,
    cache: KVCache | None,
) -> Mask | None:
    """Build the causal mask for a forward pass with or without a cache."""
    n = positions.shape[1]
    if cache is None:
        return build_mask(
            positions, causal=True, sliding_window=sliding_window, attention_mask=attention_mask, documents=documents
        )
    # Without padding, each query's own key has just been written to the cache, so every query sees at least one key.
    no_empty_rows = attention_mask is None
    if cache.is_ragged:
        return Mask(causal=True, sliding_window=sliding_window, query_positions=positions, no_empty_rows=no_empty_rows)
    if cache.n_filled == n:  # prefill: a square causal mask, which fused kernels support directly
        return Mask(causal=True, sliding_window=sliding_window)
    if n == 1 and sliding_window is None:  # a decode step attends to everything in the cache
        return None
    return Mask(causal=True, sliding_window=sliding_window, query_positions=positions, no_empty_rows=no_empty_rows)


def check_length(n: int, context_length: int, cache: KVCache | None = None) -> None:
    """Raise `ContextLengthError` if `n` tokens plus the cached tokens exceed the context length."""
    n_total = n if cache is None else cache.n_filled + n
    if n_total > context_length:
        raise ContextLengthError(f"the input has {n_total} tokens, but the model's context_length is {context_length}")
