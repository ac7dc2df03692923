"""GPT, a decoder-only Transformer language model."""

from torch import nn

from qkv.config import GPTConfig
from qkv.errors import ConfigError
from qkv.models.build import (
    build_blocks,
    build_cache,
    build_embedding,
    build_norm,
    build_relative_positions,
    build_unembedding,
)
from qkv.models.inputs import build_causal_mask, build_mask, check_length, position_ids_reserving_cache
from qkv.nn import KVCache, Tap, TokenEmbedding, check_ids_shape_dtype_range, init_weights
from qkv.tensors import AttentionMask, Ids, Logits, Residual


class GPT(nn.Module):
    """Decoder-only Transformer. The config selects the architecture, from GPT-2 to Llama.

    The model holds only weights. The KV cache is an argument of `forward`.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        self.embedding = build_embedding(config, tokens)
        self.relative_positions = build_relative_positions(config, bidirectional=not config.causal)
        self.blocks = build_blocks(config, config.n_layers)
        self.final_norm = build_norm(config) if config.final_norm else nn.Identity()
        self.last_hidden_state = Tap()
        self.unembedding = build_unembedding(config, tokens)
        # Each block writes to the residual stream twice, once in attention and once in the feed-forward layer.
        init_weights(self, std=config.init_std, n_residual_writes=2 * config.n_layers, seed=seed)

    def forward(
        self,
        ids: Ids,
        *,
        attention_mask: AttentionMask | None = None,
        documents: Ids | None = None,
        cache: KVCache | None = None,
    ) -> Logits:
        """Return the logits of the next token at every position.

        `attention_mask` is False at padding, which may be on either side. `documents` numbers packed texts that must
        not attend to each other.
        """
        hidden_states = self.hidden_states(ids, attention_mask=attention_mask, documents=documents, cache=cache)
        return self.unembedding(hidden_states)

    def hidden_states(
        self,
        ids: Ids,
        *,
        attention_mask: AttentionMask | None = None,
        documents: Ids | None = None,
        cache: KVCache | None = None,
    ) -> Residual:
        """Return the residual stream after the last block and the final norm, which is the input to the unembedding."""
        if cache is not None and not self.config.causal:
            raise ConfigError("a cache requires a causal model, but the config has causal=False")
        # These checks precede position_ids_reserving_cache so that invalid input leaves the cache unchanged.
        check_ids_shape_dtype_range(ids, self.config.vocab_size)
        check_length(ids.shape[1], self.config.context_length, cache)
        positions = position_ids_reserving_cache(ids, attention_mask=attention_mask, documents=documents, cache=cache)
        x = self.embedding(ids, positions)
        if self.config.causal:
            mask = build_causal_mask(
                positions,
                sliding_window=self.config.sliding_window,
                attention_mask=attention_mask,
                documents=documents,
                cache=cache,
            )
        else:
            mask = build_mask(
                positions,
                causal=False,
                sliding_window=self.config.sliding_window,
                attention_mask=attention_mask,
                documents=documents,
            )
        x = self.blocks(x, positions=positions, relative_positions=self.relative_positions, mask=mask, cache=cache)
        return self.last_hidden_state(self.final_norm(x))

    def new_cache(self, *, batch: int, capacity: int | None = None, growth_step: int | None = None) -> KVCache:
        """Return an empty cache for `capacity` tokens per row (default: the context length).

        If `growth_step` is set, memory is allocated in steps of at least `growth_step` tokens per row.
        """
        return build_cache(
            self.config,
            self.embedding.token,
            n_layers=self.config.n_layers,
            batch=batch,
            capacity=self.config.context_length if capacity is None else capacity,
            growth_step=growth_step,
        )
