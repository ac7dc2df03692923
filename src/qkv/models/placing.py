"""Where the tokens of one pass stand, and who may see whom among them."""

import torch
from torch import Tensor

from qkv.errors import ConfigError, ContextLengthError, InputError, ShapeError
from qkv.nn import KVCache, Mask, Source
from qkv.tensors import Ids, IsToken, Patches, Positions


def place(
    ids: Ids | Patches, *, attention_mask: IsToken | None = None, documents: Ids | None = None, cache: KVCache | None = None
) -> Positions:
    """Padding takes no position; each packed document starts at 0; a cache goes on where it stopped."""
    check_attention_mask(attention_mask, ids)
    check_shape("documents", documents, ids)
    if cache is not None:
        if documents is not None:
            raise ConfigError("documents are packed for training; they cannot be used with a cache")
        return cache.reserve(batch=ids.shape[0], n_new=ids.shape[1], attention_mask=attention_mask)
    if attention_mask is None:
        n_before = torch.arange(ids.shape[1], device=ids.device)[None]
    else:
        n_before = attention_mask.long().cumsum(1) - attention_mask.long()
    return n_before if documents is None else n_before - _starts(documents, n_before)


def _starts(documents: Tensor, n_before: Tensor) -> Tensor:
    """At each place, how many tokens there were before its document began."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (n_before * begins).cummax(1).values


def check_shape(name: str, given: Tensor | None, ids: Ids | Patches) -> None:
    if given is not None and given.shape != ids.shape[:2]:
        raise ShapeError(f"{name} has shape {tuple(given.shape)}, ids {tuple(ids.shape[:2])}")


def check_attention_mask(attention_mask: Tensor | None, ids: Ids | Patches) -> None:
    """0 and 1 are refused: as numbers they would be added to the scores."""
    check_shape("attention_mask", attention_mask, ids)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise InputError(f"attention_mask is {attention_mask.dtype}, it must be torch.bool: True where a token stands")


def check_rows(ids: Ids, source: Source) -> None:
    n_rows, n_sources = ids.shape[0], source.states.shape[0]
    if n_rows % n_sources:
        raise ShapeError(f"{n_rows} rows of ids cannot share {n_sources} sources evenly")


def mask_of(
    positions: Positions,
    *,
    causal: bool,
    window: int | None,
    attention_mask: IsToken | None,
    documents: Ids | None = None,
) -> Mask | None:
    """The rule of a pass without a cache; None where it forbids nothing."""
    if not causal and window is None and attention_mask is None and documents is None:
        return None
    # Where padding stands between tokens, a window counts the tokens alone, as it does with a cache.
    counted = positions if window is not None and attention_mask is not None else None
    return Mask(
        causal=causal,
        window=window,
        key_padding_mask=attention_mask,
        documents=documents,
        query_positions=counted,
        key_positions=counted,
    )


def causal_mask(
    positions: Positions,
    *,
    window: int | None,
    attention_mask: IsToken | None,
    documents: Ids | None,
    cache: KVCache | None,
) -> Mask | None:
    """The past and oneself; with a cache, all that stands there up to one's own position."""
    n = positions.shape[1]
    if cache is None:
        return mask_of(positions, causal=True, window=window, attention_mask=attention_mask, documents=documents)
    # Without padding every query's own key is among those just written.
    sees_itself = attention_mask is None
    if cache.is_ragged:
        return Mask(causal=True, window=window, query_positions=positions, sees_itself=sees_itself)
    if cache.n_filled == n:
        return Mask(causal=True, window=window)
    if n == 1 and window is None:
        return None
    return Mask(causal=True, window=window, query_positions=positions, sees_itself=sees_itself)


def check_length(n: int, context_length: int, cache: KVCache | None = None) -> None:
    """Refuse more tokens than the model has positions for, those in the cache included."""
    n_total = n if cache is None else cache.n_filled + n
    if n_total > context_length:
        raise ContextLengthError(f"{n_total} tokens, but the model's context_length is {context_length}")
