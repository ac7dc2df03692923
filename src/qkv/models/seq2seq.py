"""The encoder–decoder Transformer: a source (a text, or a picture) read whole, a target written token by token."""

from torch import nn

from qkv.config import Seq2SeqConfig
from qkv.models.build import (
    build_blocks,
    build_cache,
    build_embedding,
    build_norm,
    build_relation,
    build_unembedding,
)
from qkv.models.placing import causal_mask, check_length, check_rows, mask_of, place
from qkv.nn import KVCache, Mask, PatchEmbedding, Source, Tap, TokenEmbedding, check_ids, check_patches, initialise
from qkv.tensors import Ids, IsToken, Logits, Patches, Residual, SourceIds, SourceIsToken


class Side(nn.Module):
    """Encoder or decoder: embedding, blocks, norm."""

    def __init__(self, config: Seq2SeqConfig, tokens: TokenEmbedding | PatchEmbedding, *, is_decoder: bool) -> None:
        super().__init__()
        self.embedding = build_embedding(config, tokens)
        self.relation = build_relation(config, bidirectional=not is_decoder)
        n_layers = config.n_decoder_layers if is_decoder else config.n_encoder_layers
        self.blocks = build_blocks(config, n_layers, cross=is_decoder)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.final = Tap()


class Seq2Seq(nn.Module):
    """Every decoder layer reads the encoder's *last* output."""

    def __init__(self, config: Seq2SeqConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.encoder = Side(config, _of_source(config, tokens), is_decoder=False)
        self.decoder = Side(config, tokens, is_decoder=True)
        self.unembedding = build_unembedding(config, tokens)
        initialise(self, std=config.init_std, seed=seed)

    def forward(
        self,
        source: SourceIds | Patches,
        ids: Ids,
        *,
        source_attention_mask: SourceIsToken | None = None,
        attention_mask: IsToken | None = None,
    ) -> Logits:
        """Training's road: the true target prefix in, a prediction at each of its positions out."""
        return self.decode(ids, self.encode(source, attention_mask=source_attention_mask), attention_mask=attention_mask)

    def encode(self, source: SourceIds | Patches, *, attention_mask: SourceIsToken | None = None) -> Source:
        """Ids; patches where the config has a `d_patch`."""
        if self.config.d_patch is None:
            check_ids(source, self.config.source_vocab_size)
        else:
            check_patches(source, self.config.d_patch)
        check_length(source.shape[1], self.config.context_length)
        positions = place(source, attention_mask=attention_mask)
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask)
        own = mask_of(positions, causal=False, window=self.config.sliding_window, attention_mask=attention_mask)
        side = self.encoder
        x = side.blocks(side.embedding(source, positions), positions=positions, relation=side.relation, mask=own)
        return Source(states=side.final(side.final_norm(x)), mask=mask)

    def decode(
        self, ids: Ids, source: Source, *, attention_mask: IsToken | None = None, cache: KVCache | None = None
    ) -> Logits:
        """Several rows of ids may share one source, as the hypotheses of a beam do: they stand side by side."""
        return self.unembedding(self.states(ids, source, attention_mask=attention_mask, cache=cache))

    def states(
        self, ids: Ids, source: Source, *, attention_mask: IsToken | None = None, cache: KVCache | None = None
    ) -> Residual:
        # All of these before the cache moves on.
        check_ids(ids, self.config.vocab_size)
        check_length(ids.shape[1], self.config.context_length, cache)
        check_rows(ids, source)
        if cache is not None:
            cache.check_source(source.states)
        positions = place(ids, attention_mask=attention_mask, cache=cache)
        side = self.decoder
        x = side.blocks(
            side.embedding(ids, positions),
            positions=positions,
            relation=side.relation,
            mask=causal_mask(positions, window=self.config.sliding_window, attention_mask=attention_mask, documents=None, cache=cache),
            cache=cache,
            source=source,
        )
        return side.final(side.final_norm(x))

    def new_cache(self, *, batch: int, capacity: int | None = None) -> KVCache:
        """For one source batch: its cross-attention part is filled at the first step and then kept."""
        return build_cache(
            self.config,
            self.decoder.embedding.token,
            n_layers=self.config.n_decoder_layers,
            batch=batch,
            capacity=self.config.context_length if capacity is None else capacity,
        )


def _of_source(config: Seq2SeqConfig, tokens: TokenEmbedding) -> TokenEmbedding | PatchEmbedding:
    if config.d_patch is not None:
        return PatchEmbedding(config.d_patch, config.d_model)
    return tokens if config.share_embeddings else TokenEmbedding(config.source_vocab_size, config.d_model)
