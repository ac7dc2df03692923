"""The stack that all Transformer models share: input embedding, blocks and final norm.

A stack derives the position ids and the mask from its inputs, and checks them. The functions `build_…` build its
modules from a config; they are the only code that passes settings on to modules. `init_weights` initializes a model.
"""

import torch
from torch import Tensor, nn

from qkv.choices import PositionKind
from qkv.config import TransformerConfig
from qkv.errors import ConfigError, ContextLengthError, InputError, ShapeError
from qkv.nn import Attention, Block, Blocks, FeedForward, HeadConfig, KVCache, Mask, Source, Tap
from qkv.nn.embedding import InputEmbedding, PatchProjection, TokenEmbedding, Unembedding
from qkv.nn.norm import Norm, make_norm
from qkv.nn.positions import (
    ALiBi,
    ConcatenatedSinusoidalPositions,
    LearnedPositions,
    RelativeBias,
    RopeScalingRule,
    RotaryEmbedding,
    SinusoidalPositions,
)
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
        # These checks come first so that invalid input leaves the cache unchanged. `position_ids_reserving_cache` then
        # counts the new tokens as cached, which `build_mask` relies on.
        self.embedding.token.check(ids)
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
        # From here on, x is the residual stream: one vector of width d_model per token, to which every sub-layer adds.
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
        # The position of a padding token does not matter because no token attends to it.
        n_before = attention_mask.long().cumsum(1) - attention_mask.long()
    return n_before if documents is None else n_before - _document_offsets(documents, n_before)


def _document_offsets(documents: Tensor, n_before: Tensor) -> Tensor:
    """Return, for each position, the number of tokens that precede its document.

    For documents [7, 7, 8, 8, 8] and `n_before` [0, 1, 2, 3, 4], the product with `is_start` is [0, 0, 2, 0, 0], and
    its running maximum is [0, 0, 2, 2, 2].
    """
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
        # `reserve` has already counted the new tokens in `n_filled`. Padding is never written to a cache, so padding
        # keys need no mask. Shorter rows have unfilled slots, but these lie after the query's own position, because
        # slot j contains the token at position j. The causal rule therefore hides them.
        n = positions.shape[1]
        if not cache.is_ragged and cache.n_filled == n:  # the cache was empty before: a square causal mask
            return Mask(causal=True, sliding_window=sliding_window)
        if not cache.is_ragged and n == 1 and sliding_window is None:  # a decode step attends to the entire cache
            return None
        # Every real token sees at least its own key. A row that consists only of padding may see none.
        no_empty_rows = attention_mask is None
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


def build_norm(config: TransformerConfig) -> Norm:
    return make_norm(config.norm, config.d_model, eps=config.norm_eps, bias=config.norm_bias)


def build_head_config(config: TransformerConfig) -> HeadConfig:
    return HeadConfig(
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        d_value=config.d_value,
        combination=config.head_combination,
    )


def build_attention(config: TransformerConfig) -> Attention:
    return Attention(
        config.d_model,
        build_head_config(config),
        bias=config.attention_bias,
        output_projection=config.output_projection,
        scale_scores=config.scale_scores,
        dropout=config.dropout,
    )


def build_blocks(config: TransformerConfig, n_layers: int, *, cross_attention: bool = False) -> Blocks:
    def build_block() -> Block:
        return Block(
            attention=build_attention(config),
            cross_attention=build_attention(config) if cross_attention else None,
            feed_forward=FeedForward(
                config.d_model,
                config.d_ff,
                activation=config.activation,
                gated=config.gated,
                bias=config.feed_forward_bias,
            ),
            norms=[build_norm(config) for _ in range(3 if cross_attention else 2)],
            norm_position=config.norm_position,
            dropout=config.dropout,
        )

    return Blocks([build_block() for _ in range(n_layers)])


def build_relative_positions(
    config: TransformerConfig, *, bidirectional: bool
) -> RotaryEmbedding | ALiBi | RelativeBias | None:
    match config.positions:
        case PositionKind.ROTARY:
            scaling = None if config.rope_scaling is None else RopeScalingRule(**config.rope_scaling.model_dump())
            return RotaryEmbedding(config.d_head, theta=config.rope_theta, scaling=scaling)
        case PositionKind.ALIBI:
            return ALiBi(config.n_heads)
        case PositionKind.RELATIVE:
            return RelativeBias(
                config.n_heads,
                n_buckets=config.relative_buckets,
                max_distance=config.relative_max_distance,
                bidirectional=bidirectional,
            )
        case _:
            return None


def build_embedding(
    config: TransformerConfig, tokens: TokenEmbedding | PatchProjection, *, n_segments: int | None = None
) -> InputEmbedding:
    match config.positions:
        case PositionKind.LEARNED:
            position = LearnedPositions(config.context_length, config.d_model, offset=config.position_offset)
        case PositionKind.SINUSOIDAL:
            position = SinusoidalPositions(style=config.sinusoid)
        case PositionKind.CONCATENATED:
            position = ConcatenatedSinusoidalPositions(config.d_model, style=config.sinusoid)
        case _:
            position = None
    return InputEmbedding(
        tokens,
        position=position,
        n_segments=n_segments,
        scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        norm=build_norm(config) if config.embedding_norm else None,
        dropout=config.dropout,
    )


def build_unembedding(config: TransformerConfig, tokens: TokenEmbedding) -> Unembedding:
    return Unembedding(
        config.vocab_size,
        config.d_model,
        tied_to=tokens if config.tie_embeddings else None,
        bias=config.unembedding_bias,
        scale=config.d_model**-0.5 if config.scale_logits else 1.0,
    )


_INITIALIZED_MODULES = (nn.Linear, nn.Embedding, TokenEmbedding, PatchProjection, Unembedding, nn.GRU, nn.LSTM)


def init_weights(model: nn.Module, *, std: float, n_residual_writes: int = 1, seed: int = 0) -> None:
    """Initialize matrices from a normal distribution with standard deviation `std`, and biases to 0.

    Projections that write to the residual stream use std / √n_residual_writes so that the magnitude of the stream does
    not grow with depth (GPT-2). Other modules, such as norms, keep the initial values that they set themselves. A model
    on the meta device is left unchanged.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    generator = torch.Generator().manual_seed(seed)
    initialized: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, _INITIALIZED_MODULES):
            is_residual_write = name.endswith((".out_proj", ".down_proj"))
            module_std = std / n_residual_writes**0.5 if is_residual_write else std
            for parameter_name, parameter in module.named_parameters(recurse=False):
                # Tied parameters belong to several modules. The first module in module order determines their
                # initialization.
                if id(parameter) in initialized:
                    continue
                initialized.add(id(parameter))
                with torch.no_grad():
                    if parameter_name.startswith("bias"):
                        parameter.zero_()
                    else:
                        # Drawn on the CPU and then copied so that the weights do not depend on the device.
                        drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                        parameter.copy_(drawn.normal_(std=module_std, generator=generator))
