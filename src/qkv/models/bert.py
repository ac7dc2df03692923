"""BERT, an encoder-only Transformer with heads for masked words, next sentences and classification."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.choices import PoolerActivation
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.models.stack import Stack, build_norm, build_unembedding, init_weights
from qkv.nn import TokenEmbedding
from qkv.nn.block import activate
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


class BERT(Stack):
    """Encoder-only Transformer.

    `forward` returns the hidden states, and each head is a method that takes them as input. A head exists only if the
    config enables it.
    """

    def __init__(self, config: BERTConfig, *, seed: int = 0) -> None:
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        super().__init__(config, tokens, n_layers=config.n_layers, causal=False, n_segments=config.n_segments or None)
        self.config = config
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
        documents: Ids | None = None,
    ) -> Residual:
        """Return the hidden state of every position.

        `segments` is 0 for sentence A (the default) and 1 for sentence B. See `hidden_states` for the other arguments.
        """
        # Without a causal mask, every state depends on the tokens on both sides. Predicting the next token would be
        # trivial, so BERT is trained to predict tokens that were masked in the input.
        return self.hidden_states(ids, segments=segments, attention_mask=attention_mask, documents=documents)

    def pooled_output(self, hidden_states: Residual) -> Float[Tensor, "batch d_model"]:
        """Return the pooled [CLS] state, which is tanh(W·h) or ReLU(W·h) depending on the config.

        [CLS] is expected at the first position, so sequences must be padded on the right.
        """
        activation = torch.tanh if self.config.pooler_activation is PoolerActivation.TANH else torch.relu
        return activation(_check_exists(self.pooler, "pooler=True")(hidden_states[:, 0]))

    def masked_lm_logits(self, hidden_states: Residual) -> Logits:
        return _check_exists(self.masked_lm, "masked_lm_head=True")(hidden_states)

    def next_sentence_logits(self, hidden_states: Residual) -> Float[Tensor, "batch 2"]:
        """Return the next-sentence logits: index 0 if B follows A, and index 1 if B is a random sentence."""
        return _check_exists(self.next_sentence, "next_sentence_head=True")(self.pooled_output(hidden_states))

    def class_logits(self, hidden_states: Residual) -> Float[Tensor, "batch class"]:
        classifier = _check_exists(self.classifier, "n_classes")
        return classifier(self.dropout(self.pooled_output(hidden_states)))


def _check_exists(head: nn.Module | None, setting: str) -> nn.Module:
    if head is None:
        raise ConfigError(f"this BERT model lacks the head that it needs here; set {setting} in its config")
    return head
