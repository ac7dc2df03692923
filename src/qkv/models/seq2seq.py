"""Encoder–decoder Transformer for text or image sources."""

from torch import nn

from qkv.config import Seq2SeqConfig
from qkv.models.stack import Stack, build_unembedding, check_rows_multiple_of_sources, init_weights
from qkv.nn import KVCache, Mask, PatchProjection, Source, TokenEmbedding
from qkv.tensors import AttentionMask, Ids, Logits, Patches, Residual, SourceAttentionMask, SourceIds


class Seq2Seq(nn.Module):
    """Encoder–decoder Transformer. Every decoder layer attends to the output of the last encoder layer."""

    def __init__(self, config: Seq2SeqConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        if config.d_patch is not None:
            source_tokens = PatchProjection(config.d_patch, config.d_model)
        elif config.share_embeddings:
            source_tokens = tokens
        else:
            source_tokens = TokenEmbedding(config.source_vocab_size, config.d_model)
        self.encoder = Stack(config, source_tokens, n_layers=config.n_encoder_layers, causal=False)
        self.decoder = Stack(config, tokens, n_layers=config.n_decoder_layers, causal=True, cross_attention=True)
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
        # The decoder reads the true prefix, not its own predictions, so all target positions are computed at once.
        encoded = self.encode(source, attention_mask=source_attention_mask)
        return self.decode(ids, encoded, attention_mask=attention_mask)

    def encode(self, source: SourceIds | Patches, *, attention_mask: SourceAttentionMask | None = None) -> Source:
        """Run the encoder on token ids, or on patches if the config has a `d_patch`."""
        states = self.encoder.hidden_states(source, attention_mask=attention_mask)
        # Cross-attention masks only padding because the sliding window does not apply between source and target.
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask)
        return Source(states=states, mask=mask)

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
        check_rows_multiple_of_sources(ids, source)
        if cache is not None:
            cache.check_and_store_source(source.states)
        return self.decoder.hidden_states(ids, attention_mask=attention_mask, cache=cache, source=source)

    def new_cache(self, *, batch: int, capacity: int | None = None) -> KVCache:
        """Return an empty cache for decoding with one batch of sources.

        The cross-attention keys and values are computed in the first decode step and then reused.
        """
        return self.decoder.new_cache(batch=batch, capacity=capacity)
