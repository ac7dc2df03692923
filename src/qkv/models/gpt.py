"""GPT, a decoder-only Transformer language model."""

from qkv.config import GPTConfig
from qkv.models.stack import Stack, build_unembedding, init_weights
from qkv.nn import KVCache, TokenEmbedding
from qkv.tensors import AttentionMask, Ids, Logits


class GPT(Stack):
    """Decoder-only Transformer. The config selects the architecture, from GPT-2 to Llama.

    The model holds only weights. The KV cache is an argument of `forward`. A model with `causal=False` shows what
    goes wrong without a causal mask (lecture D) and cannot generate text.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        tokens = TokenEmbedding(config.vocab_size, config.d_model)
        super().__init__(config, tokens, n_layers=config.n_layers, causal=config.causal)
        self.config = config
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
        """Return the logits of the next token at every position. See `hidden_states` for the arguments."""
        # The causal mask hides later tokens from every position, so one pass trains the predictions at all positions.
        states = self.hidden_states(ids, attention_mask=attention_mask, documents=documents, cache=cache)
        return self.unembedding(states)
