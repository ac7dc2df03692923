"""The RNN encoder–decoder with attention: what the Transformer replaced."""

from dataclasses import dataclass

from torch import nn

from qkv.config import RNNConfig
from qkv.errors import ShapeError
from qkv.models.placing import check_attention_mask, check_length, check_rows
from qkv.nn import (
    AttentiveDecoder,
    Mask,
    RecurrentEncoder,
    Source,
    SourceCache,
    State,
    TokenEmbedding,
    Unembedding,
    check_ids,
    initialise,
)
from qkv.tensors import Ids, Logits, SourceIds, SourceIsToken


@dataclass(frozen=True, kw_only=True)
class RNNSource:
    """What the decoder starts from: the encoder's states to look at, and its own first state."""

    source: Source
    state: State


class RNNSeq2Seq(nn.Module):
    """Bidirectional encoder, decoder whose states look at the encoder's (or not: attention='none')."""

    def __init__(self, config: RNNConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.source_embedding = TokenEmbedding(config.source_vocab_size, d_model)
        self.embedding = TokenEmbedding(config.vocab_size, d_model)
        self.encoder = RecurrentEncoder(
            d_model,
            cell=config.cell,
            n_layers=config.n_encoder_layers,
            n_decoder_layers=config.n_decoder_layers,
            dropout=config.dropout,
        )
        self.decoder = AttentiveDecoder(
            d_model,
            cell=config.cell,
            n_layers=config.n_decoder_layers,
            kind=config.attention,
            dropout=config.dropout,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = Unembedding(
            config.vocab_size,
            d_model,
            tied_to=self.embedding if config.tie_embeddings else None,
            bias=True,
        )
        initialise(self, std=config.init_std, seed=seed)

    def forward(self, source_ids: SourceIds, ids: Ids, *, source_attention_mask: SourceIsToken | None = None) -> Logits:
        """The true target prefix in, a prediction at each of its positions out; padding goes on the right."""
        start = self.encode(source_ids, attention_mask=source_attention_mask)
        return self.decode(ids, start.source, start.state)[0]

    def encode(self, source_ids: SourceIds, *, attention_mask: SourceIsToken | None = None) -> RNNSource:
        check_ids(source_ids, self.config.source_vocab_size)
        check_length(source_ids.shape[1], self.config.context_length)
        check_attention_mask(attention_mask, source_ids)
        states, first = self.encoder(self.dropout(self.source_embedding(source_ids)), attention_mask)
        mask = None if attention_mask is None else Mask(key_padding_mask=attention_mask)
        return RNNSource(source=Source(states=states, mask=mask), state=first)

    def decode(
        self, ids: Ids, source: Source, state: State, *, cache: SourceCache | None = None
    ) -> tuple[Logits, State]:
        """Any number of steps on from `state`; one id a row is a decoder's single step.

        `cache` keeps what attention makes of the source, for the steps that follow.
        """
        check_ids(ids, self.config.vocab_size)
        check_length(ids.shape[1], self.config.context_length)
        if state[0].shape[1] != ids.shape[0]:
            raise ShapeError(f"the state is of {state[0].shape[1]} rows, the ids have {ids.shape[0]}")
        check_rows(ids, source)
        x = self.dropout(self.embedding(ids))
        states, state = self.decoder(x, state, source=source.states, mask=source.mask, cache=cache)
        return self.unembedding(self.dropout(states)), state
