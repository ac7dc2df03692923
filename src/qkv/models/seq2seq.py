"""Encoder–decoder Transformer for text or image sources."""

from torch import nn

from qkv.config import Seq2SeqConfig
from qkv.models.build import (
    build_blocks,
    build_cache,
    build_embedding,
    build_norm,
    build_relative_positions,
    build_unembedding,
)
from qkv.models.inputs import (
    build_causal_mask,
    build_mask,
    check_length,
    check_rows_multiple_of_sources,
    position_ids_reserving_cache,
)
from qkv.nn import (
    KVCache,
    Mask,
    PatchProjection,
    Source,
    Tap,
    TokenEmbedding,
    check_ids_shape_dtype_range,
    check_patches_shape_and_dtype,
    init_weights,
)
from qkv.tensors import AttentionMask, Ids, Logits, Patches, Residual, SourceAttentionMask, SourceIds


class EncoderOrDecoder(nn.Module):
    """Encoder or decoder, which consists of an embedding, blocks and a final norm."""

    def __init__(self, config: Seq2SeqConfig, tokens: TokenEmbedding | PatchProjection, *, is_decoder: bool) -> None:
        super().__init__()
        self.embedding = build_embedding(config, tokens)
        self.relative_positions = build_relative_positions(config, bidirectional=not is_decoder)
        n_layers = config.n_decoder_layers if is_decoder else config.n_encoder_layers
        self.blocks = build_blocks(config, n_layers, cross_attention=is_decoder)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.last_hidden_state = Tap()


class Seq2Seq(nn.Module):
    """Encoder–decoder Transformer. Every decoder layer attends to the output of the last encoder layer."""

    def __init__(self, config: Seq2SeqConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.encoder = EncoderOrDecoder(config, _build_source_embedding(config, tokens), is_decoder=False)
        self.decoder = EncoderOrDecoder(config, tokens, is_decoder=True)
        self.unembedding = build_unembedding(config, tokens)
        init_weights(self, std=config.init_std, seed=seed)

    def forward(
        self,
        source: SourceIds | Patches,
        ids: Ids,
        *,
        source_attention_mask: SourceAttentionMask | None = None,
        attention_mask: AttentionMask | None = None,
    ) -> Logits:
        """Return the logits at every target position, given the true target prefix (teacher forcing)."""
        encoded = self.encode(source, attention_mask=source_attention_mask)
        return self.decode(ids, encoded, attention_mask=attention_mask)

    def encode(self, source: SourceIds | Patches, *, attention_mask: SourceAttentionMask | None = None) -> Source:
        """Run the encoder on token ids, or on patches if the config has a `d_patch`."""
        if self.config.d_patch is None:
            check_ids_shape_dtype_range(source, self.config.source_vocab_size)
        else:
            check_patches_shape_and_dtype(source, self.config.d_patch)
        check_length(source.shape[1], self.config.context_length)
        positions = position_ids_reserving_cache(source, attention_mask=attention_mask)
        encoder = self.encoder
        x = encoder.blocks(
            encoder.embedding(source, positions),
            positions=positions,
            relative_positions=encoder.relative_positions,
            mask=build_mask(
                positions, causal=False, sliding_window=self.config.sliding_window, attention_mask=attention_mask
            ),
        )
        # Cross-attention masks only padding because the sliding window does not apply between source and target.
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask)
        return Source(states=encoder.last_hidden_state(encoder.final_norm(x)), mask=mask)

    def decode(
        self, ids: Ids, source: Source, *, attention_mask: AttentionMask | None = None, cache: KVCache | None = None
    ) -> Logits:
        """Return the logits at every target position.

        Several consecutive rows of ids may share one source, such as the beams in a beam search.
        """
        return self.unembedding(self.hidden_states(ids, source, attention_mask=attention_mask, cache=cache))

    def hidden_states(
        self, ids: Ids, source: Source, *, attention_mask: AttentionMask | None = None, cache: KVCache | None = None
    ) -> Residual:
        """Return the decoder states after the final norm, which are the input to the unembedding."""
        # These checks precede position_ids_reserving_cache so that invalid input leaves the cache unchanged.
        check_ids_shape_dtype_range(ids, self.config.vocab_size)
        check_length(ids.shape[1], self.config.context_length, cache)
        check_rows_multiple_of_sources(ids, source)
        if cache is not None:
            cache.check_and_store_source(source.states)
        positions = position_ids_reserving_cache(ids, attention_mask=attention_mask, cache=cache)
        decoder = self.decoder
        x = decoder.blocks(
            decoder.embedding(ids, positions),
            positions=positions,
            relative_positions=decoder.relative_positions,
            mask=build_causal_mask(
                positions,
                sliding_window=self.config.sliding_window,
                attention_mask=attention_mask,
                documents=None,
                cache=cache,
            ),
            cache=cache,
            source=source,
        )
        return decoder.last_hidden_state(decoder.final_norm(x))

    def new_cache(self, *, batch: int, capacity: int | None = None) -> KVCache:
        """Return an empty cache for decoding with one batch of sources.

        The cross-attention keys and values are computed in the first decode step and then reused.
        """
        return build_cache(
            self.config,
            self.decoder.embedding.token,
            n_layers=self.config.n_decoder_layers,
            batch=batch,
            capacity=self.config.context_length if capacity is None else capacity,
        )


def _build_source_embedding(config: Seq2SeqConfig, tokens: TokenEmbedding) -> TokenEmbedding | PatchProjection:
    if config.d_patch is not None:
        return PatchProjection(config.d_patch, config.d_model)
    return tokens if config.share_embeddings else TokenEmbedding(config.source_vocab_size, config.d_model)
