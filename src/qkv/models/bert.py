"""BERT, an encoder-only Transformer with heads for masked words, next sentences and classification."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import PoolerActivation
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.models.build import (
    build_blocks,
    build_embedding,
    build_norm,
    build_relative_positions,
    build_unembedding,
)
from qkv.models.inputs import build_mask, check_length, position_ids_reserving_cache
from qkv.nn import Mask, Tap, TokenEmbedding, Varlen, activate, check_ids_shape_dtype_range, init_weights
from qkv.tensors import AttentionMask, Ids, Logits, Residual


class MaskedLMHead(nn.Module):
    """Masked-language-modeling head, which consists of a linear layer, an activation, a norm and an unembedding."""

    def __init__(self, config: BERTConfig, tokens: TokenEmbedding) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.norm = build_norm(config)
        self.unembedding = build_unembedding(config, tokens)

    def forward(self, hidden_states: Residual) -> Logits:
        return self.unembedding(self.norm(activate(self.dense(hidden_states), self.activation)))


class BERT(nn.Module):
    """Encoder-only Transformer.

    `forward` returns the hidden states, and each head is a method that takes them as input. A head exists only if the
    config enables it.
    """

    def __init__(self, config: BERTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.embedding = build_embedding(config, tokens, n_segments=config.n_segments or None)
        self.relative_positions = build_relative_positions(config, bidirectional=True)
        self.blocks = build_blocks(config, config.n_layers)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.last_hidden_state = Tap()
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        self.masked_lm = MaskedLMHead(config, tokens) if config.masked_lm_head else None
        self.next_sentence = nn.Linear(config.d_model, 2) if config.next_sentence_head else None
        self.classifier = None if config.n_classes is None else nn.Linear(config.d_model, config.n_classes)
        self.dropout = nn.Dropout(config.dropout)
        init_weights(self, std=config.init_std, seed=seed)

    def forward(
        self,
        ids: Ids,
        *,
        segments: Ids | None = None,
        attention_mask: AttentionMask | None = None,
        documents: Ids | Varlen | None = None,
    ) -> Residual:
        """Return the hidden state of every position.

        `segments` is 0 for sentence A (the default) and 1 for sentence B. `documents` separates packed texts that must
        not attend to each other: either document numbers, or a `Varlen` for a single row of any length.
        """
        check_ids_shape_dtype_range(ids, self.config.vocab_size)
        sliding_window = self.config.sliding_window
        if isinstance(documents, Varlen):
            if attention_mask is not None:
                raise ConfigError("attention_mask cannot be combined with documents=Varlen(…), which has no padding")
            if len(ids) > 1:
                raise ConfigError(f"documents=Varlen(…) requires ids of a single row, got {len(ids)} rows")
            check_length(documents.max_seqlen, self.config.context_length)
            positions = documents.position_ids(ids.shape[1])
            mask = Mask(varlen=documents, sliding_window=sliding_window, no_empty_rows=True)
        else:
            check_length(ids.shape[1], self.config.context_length)
            positions = position_ids_reserving_cache(ids, attention_mask=attention_mask, documents=documents)
            mask = build_mask(
                positions,
                causal=False,
                sliding_window=sliding_window,
                attention_mask=attention_mask,
                documents=documents,
            )
        x = self.embedding(ids, positions, segments)
        x = self.blocks(x, positions=positions, relative_positions=self.relative_positions, mask=mask)
        return self.last_hidden_state(self.final_norm(x))

    def pooled_output(self, hidden_states: Residual) -> Float[Tensor, "batch d_model"]:
        """Return the pooled [CLS] state, which is tanh(W·h) or ReLU(W·h) depending on the config.

        [CLS] is expected at the first position, so sequences must be padded on the right.
        """
        if self.pooler is None:
            raise ConfigError(_missing_head_message("pooler", "pooler=True"))
        activation = torch.tanh if self.config.pooler_activation is PoolerActivation.TANH else torch.relu
        return activation(self.pooler(hidden_states[:, 0]))

    def masked_lm_logits(self, hidden_states: Residual) -> Logits:
        if self.masked_lm is None:
            raise ConfigError(_missing_head_message("masked-LM head", "masked_lm_head=True"))
        return self.masked_lm(hidden_states)

    def next_sentence_logits(self, hidden_states: Residual) -> Float[Tensor, "batch 2"]:
        """Return the next-sentence logits: index 0 if B follows A, and index 1 if B is a random sentence."""
        if self.next_sentence is None:
            raise ConfigError(_missing_head_message("next-sentence head", "next_sentence_head=True"))
        return self.next_sentence(self.pooled_output(hidden_states))

    def class_logits(self, hidden_states: Residual) -> Float[Tensor, "batch class"]:
        if self.classifier is None:
            raise ConfigError(_missing_head_message("classification head", "n_classes"))
        return self.classifier(self.dropout(self.pooled_output(hidden_states)))


def _missing_head_message(head: str, setting: str) -> str:
    return f"this BERT model has no {head}; set {setting} in its config"
