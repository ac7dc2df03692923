"""The stack that all Transformer models share: input embedding, blocks and final norm.

A stack also derives the position ids and the mask from its inputs, and checks them.
"""

import torch
from torch import Tensor, nn

from qkv.config import TransformerConfig
from qkv.errors import ConfigError, ContextLengthError, InputError, ShapeError
from qkv.models.build import build_blocks, build_embedding, build_head_config, build_norm, build_relative_positions
from qkv.nn import KVCache, Mask, PatchProjection, Source, Tap, TokenEmbedding
from qkv.nn.embedding import check_ids_shape_dtype_range, check_patches_shape_and_dtype
from qkv.tensors import AttentionMask, Ids, Patches, Positions, Residual


class Stack(nn.Module):
    """Input embedding, blocks and final norm. GPT, BERT, and the encoder and the decoder of a Seq2Seq are stacks."""

    def __init__(
        self,
        config: TransformerConfig,
        tokens: TokenEmbedding | PatchProjection,
        *,
        n_layers: int,
        causal: bool,
        cross_attention: bool = False,
        n_segments: int | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.sliding_window, self.context_length = causal, config.sliding_window, config.context_length
        self.head_config = build_head_config(config)
        self.embedding = build_embedding(config, tokens, n_segments=n_segments)
        self.relative_positions = build_relative_positions(config, bidirectional=not causal)
        self.blocks = build_blocks(config, n_layers, cross_attention=cross_attention)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.last_hidden_state = Tap()

    def hidden_states(
        self,
        ids: Ids | Patches,
        *,
        segments: Ids | None = None,
        attention_mask: AttentionMask | None = None,
        documents: Ids | None = None,
        cache: KVCache | None = None,
        source: Source | None = None,
    ) -> Residual:
        """Return the residual stream after the last block and the final norm.

        `attention_mask` is False at padding, which may be on either side. `documents` numbers packed texts that must
        not attend to each other. `source` is what the cross-attention of a decoder attends to.
        """
        if cache is not None and not self.causal:
            raise ConfigError("a cache requires a causal model, but the config has causal=False")
        # These checks precede position_ids_reserving_cache so that invalid input leaves the cache unchanged.
        if isinstance(self.embedding.token, TokenEmbedding):
            check_ids_shape_dtype_range(ids, self.embedding.token.weight.shape[0])
        else:
            check_patches_shape_and_dtype(ids, self.embedding.token.weight.shape[0])
        check_length(ids.shape[1], self.context_length, cache)
        positions = position_ids_reserving_cache(ids, attention_mask=attention_mask, documents=documents, cache=cache)
        mask = build_mask(
            positions,
            causal=self.causal,
            sliding_window=self.sliding_window,
            attention_mask=attention_mask,
            documents=documents,
            cache=cache,
        )
        x = self.embedding(ids, positions, segments)
        relative = self.relative_positions
        x = self.blocks(x, positions=positions, relative_positions=relative, mask=mask, cache=cache, source=source)
        return self.last_hidden_state(self.final_norm(x))

    def new_cache(self, *, batch: int, capacity: int | None = None, growth_step: int | None = None) -> KVCache:
        """Return an empty cache for `capacity` tokens per row (default: the context length).

        If `growth_step` is set, memory is allocated in steps of at least `growth_step` tokens per row.
        """
        return KVCache(
            n_layers=len(self.blocks),
            batch=batch,
            capacity=self.context_length if capacity is None else capacity,
            key_shape=(self.head_config.n_kv_heads, self.head_config.d_head),
            value_shape=(self.head_config.n_kv_heads, self.head_config.d_value),
            like=self.embedding.token.weight,
            growth_step=growth_step,
        )


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
        raise InputError(f"attention_mask must have dtype torch.bool (True = real token), got {attention_mask.dtype}")


def check_rows_multiple_of_sources(ids: Ids, source: Source) -> None:
    n_rows, n_sources = ids.shape[0], source.states.shape[0]
    if n_rows % n_sources:
        raise ShapeError(f"the rows of ids must be a multiple of the sources, got {n_rows} and {n_sources}")


def build_mask(
    positions: Positions,
    *,
    causal: bool,
    sliding_window: int | None = None,
    attention_mask: AttentionMask | None = None,
    documents: Ids | None = None,
    cache: KVCache | None = None,
) -> Mask | None:
    """Build the mask for a forward pass with or without a cache. Return `None` if every key is visible."""
    if cache is not None:
        # Without padding, each query's own key has just been written to the cache, so every query sees a key.
        no_empty_rows = attention_mask is None
        n = positions.shape[1]
        if not cache.is_ragged and cache.n_filled == n:  # prefill: a square causal mask
            return Mask(causal=True, sliding_window=sliding_window)
        if not cache.is_ragged and n == 1 and sliding_window is None:  # a decode step attends to the entire cache
            return None
        return Mask(causal=True, sliding_window=sliding_window, query_positions=positions, no_empty_rows=no_empty_rows)
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


def check_length(n: int, context_length: int, cache: KVCache | None = None) -> None:
    """Raise `ContextLengthError` if `n` tokens plus the cached tokens exceed the context length."""
    n_total = n if cache is None else cache.n_filled + n
    if n_total > context_length:
        raise ContextLengthError(f"the input has {n_total} tokens, but the model's context_length is {context_length}")
