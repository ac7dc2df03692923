"""BERT: an encoder-only Transformer, with heads for its two pre-training games and for classes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import PoolerActivation
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.models.build import build_blocks, build_embedding, build_norm, build_relation, build_unembedding
from qkv.models.placing import check_length, mask_of, place
from qkv.nn import Mask, Packed, Tap, TokenEmbedding, activate, check_ids, initialise
from qkv.tensors import Ids, IsToken, Logits, Residual


class MaskedWordHead(nn.Module):
    """Which word was hidden here: dense, activation, norm, then the token table."""

    def __init__(self, config: BERTConfig, tokens: TokenEmbedding) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.norm = build_norm(config)
        self.unembedding = build_unembedding(config, tokens)

    def forward(self, states: Residual) -> Logits:
        return self.unembedding(self.norm(activate(self.dense(states), self.activation)))


class BERT(nn.Module):
    """`forward` is the backbone; each head is a method on its states, there if the config asks for it."""

    def __init__(self, config: BERTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.embedding = build_embedding(config, tokens, n_segments=config.n_segments or None)
        self.relation = build_relation(config, bidirectional=True)
        self.blocks = build_blocks(config, config.n_layers)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.final = Tap()
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.masked_word = MaskedWordHead(config, tokens) if config.masked_word_head else None
        self.next_sentence = nn.Linear(config.d_model, 2) if config.next_sentence_head else None
        self.classifier = None if config.n_classes is None else nn.Linear(config.d_model, config.n_classes)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self, std=config.init_std, seed=seed)

    def forward(
        self,
        ids: Ids,
        *,
        segments: Ids | None = None,
        attention_mask: IsToken | None = None,
        documents: Ids | Packed | None = None,
    ) -> Residual:
        """Every position's state, having seen all others. `segments`: 0 for sentence A (the default), 1 for B.

        `documents`: texts that must not see each other, numbered, or `Packed`: a single row, as long as one likes.
        """
        check_ids(ids, self.config.vocab_size)
        window = self.config.sliding_window
        if isinstance(documents, Packed):
            if attention_mask is not None or len(ids) > 1:
                given = f"there are {len(ids)} rows" if len(ids) > 1 else "attention_mask was given"
                raise ConfigError(f"packed texts are one row without padding; {given}")
            check_length(documents.longest, self.config.context_length)
            positions, mask = documents.positions(ids.shape[1]), Mask(packed=documents, window=window, sees_itself=True)
        else:
            check_length(ids.shape[1], self.config.context_length)
            positions = place(ids, attention_mask=attention_mask, documents=documents)
            mask = mask_of(positions, causal=False, window=window, attention_mask=attention_mask, documents=documents)
        x = self.embedding(ids, positions, segments)
        x = self.blocks(x, positions=positions, relation=self.relation, mask=mask)
        return self.final(self.final_norm(x))

    def pooled(self, states: Residual) -> Float[Tensor, "batch d_model"]:
        """tanh(W·[CLS]), or ReLU as the config says; [CLS] is the first position, so pad on the right."""
        if self.pooler is None:
            raise ConfigError(_missing("pooler", "pooler=True"))
        activation = torch.tanh if self.config.pooler_activation is PoolerActivation.TANH else torch.relu
        return activation(self.pooler(states[:, 0]))

    def masked_word_logits(self, states: Residual) -> Logits:
        if self.masked_word is None:
            raise ConfigError(_missing("masked-word head", "masked_word_head=True"))
        return self.masked_word(states)

    def next_sentence_logits(self, states: Residual) -> Float[Tensor, "batch 2"]:
        """Column 0: B is what really follows A; column 1: B comes from elsewhere (the published order)."""
        if self.next_sentence is None:
            raise ConfigError(_missing("next-sentence head", "next_sentence_head=True"))
        return self.next_sentence(self.pooled(states))

    def class_logits(self, states: Residual) -> Float[Tensor, "batch class"]:
        if self.classifier is None:
            raise ConfigError(_missing("classification head", "n_classes"))
        return self.classifier(self.dropout(self.pooled(states)))


def _missing(head: str, setting: str) -> str:
    return f"this BERT has no {head}; build it with {setting} in its config"
