"""RNN encoder–decoder with attention."""

from dataclasses import dataclass

from torch import nn

from qkv.config import RNNConfig
from qkv.errors import ShapeError
from qkv.models.stack import check_attention_mask, check_length, check_rows_multiple_of_sources, init_weights
from qkv.nn import Mask, Source, TokenEmbedding, Unembedding
from qkv.nn.cache import LayerSourceCache
from qkv.nn.embedding import check_ids_shape_dtype_range
from qkv.nn.recurrent import AttentiveDecoder, BidirectionalRecurrentEncoder, State
from qkv.tensors import Ids, Logits, SourceAttentionMask, SourceIds


@dataclass(frozen=True, kw_only=True)
class RNNSource:
    """Encoder states for the decoder to attend to, with the decoder's initial state."""

    source: Source
    state: State


class RNNSeq2Seq(nn.Module):
    """Bidirectional recurrent encoder and recurrent decoder with attention to the encoder states.

    With `attention="none"` in the config, the decoder receives only the encoder's last state.
    """

    def __init__(self, config: RNNConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.source_embedding = TokenEmbedding(config.source_vocab_size, d_model)
        self.embedding = TokenEmbedding(config.vocab_size, d_model)
        self.encoder = BidirectionalRecurrentEncoder(
            d_model,
            cell=config.cell,
            n_layers=config.n_encoder_layers,
            n_decoder_layers=config.n_decoder_layers,
            dropout=config.dropout,
        )
        self.decoder = AttentiveDecoder(
            d_model, cell=config.cell, n_layers=config.n_decoder_layers, kind=config.attention, dropout=config.dropout
        )
        self.dropout = nn.Dropout(config.dropout)
        tied_to = self.embedding if config.tie_embeddings else None
        self.unembedding = Unembedding(config.vocab_size, d_model, tied_to=tied_to, bias=True)
        init_weights(self, std=config.init_std, seed=seed)

    def forward(
        self, source_ids: SourceIds, ids: Ids, *, source_attention_mask: SourceAttentionMask | None = None
    ) -> Logits:
        """Return the logits at every target position, given the true target prefix (teacher forcing).

        Targets must be padded on the right.
        """
        encoded = self.encode(source_ids, attention_mask=source_attention_mask)
        return self.decode(ids, encoded.source, encoded.state)[0]

    def encode(self, source_ids: SourceIds, *, attention_mask: SourceAttentionMask | None = None) -> RNNSource:
        """Encode source ids and return the encoder states with the decoder's initial state."""
        check_ids_shape_dtype_range(source_ids, self.config.source_vocab_size)
        check_length(source_ids.shape[1], self.config.context_length)
        check_attention_mask(attention_mask, source_ids)
        states, initial_state = self.encoder(self.dropout(self.source_embedding(source_ids)), attention_mask)
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask)
        return RNNSource(source=Source(states=states, mask=mask), state=initial_state)

    def decode(
        self, ids: Ids, source: Source, state: State, *, cache: LayerSourceCache | None = None
    ) -> tuple[Logits, State]:
        """Decode one or more ids per row, starting from `state`, and return the logits and the new state.

        `cache` stores the attention keys of the source for later steps.
        """
        check_ids_shape_dtype_range(ids, self.config.vocab_size)
        check_length(ids.shape[1], self.config.context_length)
        if state[0].shape[1] != ids.shape[0]:
            raise ShapeError(f"the state has {state[0].shape[1]} rows, but the ids have {ids.shape[0]}")
        check_rows_multiple_of_sources(ids, source)
        x = self.dropout(self.embedding(ids))
        states, state = self.decoder(x, state, source=source.states, mask=source.mask, cache=cache)
        return self.unembedding(self.dropout(states)), state
