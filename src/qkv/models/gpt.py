"""GPT: a decoder-only Transformer. Ids in, a logit for every token of the vocabulary at every position out."""

from torch import nn

from qkv.config import GPTConfig
from qkv.errors import ConfigError
from qkv.models.build import (
    build_blocks,
    build_cache,
    build_embedding,
    build_norm,
    build_relation,
    build_unembedding,
)
from qkv.models.placing import causal_mask, check_length, mask_of, place
from qkv.nn import KVCache, Tap, TokenEmbedding, check_ids, initialise
from qkv.tensors import Ids, IsToken, Logits, Residual


class GPT(nn.Module):
    """GPT-2, Llama and everything between, by its config. Weights alone: the cache is an argument."""

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.embedding = build_embedding(config, tokens)
        self.relation = build_relation(config, bidirectional=not config.causal)
        self.blocks = build_blocks(config, config.n_layers)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.final = Tap()
        self.unembedding = build_unembedding(config, tokens)
        initialise(self, std=config.init_std, n_residual_writes=2 * config.n_layers, seed=seed)

    def forward(
        self,
        ids: Ids,
        *,
        attention_mask: IsToken | None = None,
        documents: Ids | None = None,
        cache: KVCache | None = None,
    ) -> Logits:
        """`attention_mask` marks padding, left or right; `documents` numbers packed texts that must not see each other."""
        return self.unembedding(self.states(ids, attention_mask=attention_mask, documents=documents, cache=cache))

    def states(
        self,
        ids: Ids,
        *,
        attention_mask: IsToken | None = None,
        documents: Ids | None = None,
        cache: KVCache | None = None,
    ) -> Residual:
        """The last residual stream, normed: what the unembedding reads."""
        if cache is not None and not self.config.causal:
            raise ConfigError("a cache holds the past; with causal=False there is none, every position sees all")
        check_ids(ids, self.config.vocab_size)  # before the cache moves on
        check_length(ids.shape[1], self.config.context_length, cache)
        positions = place(ids, attention_mask=attention_mask, documents=documents, cache=cache)
        x = self.embedding(ids, positions)
        if self.config.causal:
            mask = causal_mask(
                positions, window=self.config.sliding_window, attention_mask=attention_mask, documents=documents, cache=cache
            )
        else:
            mask = mask_of(positions, causal=False, window=self.config.sliding_window, attention_mask=attention_mask, documents=documents)
        x = self.blocks(x, positions=positions, relation=self.relation, mask=mask, cache=cache)
        return self.final(self.final_norm(x))

    def new_cache(self, *, batch: int, capacity: int | None = None, chunk: int | None = None) -> KVCache:
        """Room for `capacity` tokens a row; the whole context unless said. `chunk`: taken so many at a time."""
        return build_cache(
            self.config,
            self.embedding.token,
            n_layers=self.config.n_layers,
            batch=batch,
            capacity=self.config.context_length if capacity is None else capacity,
            chunk=chunk,
        )
