"""GPT-2's published names and settings. Its matrices are in × out; query, key and value are one of them."""

from typing import Any

from qkv.config import GPTConfig
from qkv.weights.names import NameTable, Rename, Turn, layers, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "n_layer": "n_layers",
    "n_inner": "d_ff",
    "layer_norm_epsilon": "norm_eps",
    "scale_attn_weights": "scale_scores",
    "tie_word_embeddings": "tie_embeddings",
    "resid_pdrop": "dropout",
    "initializer_range": "init_std",
}
# A head for multiple choice, an old copy of n_positions, and an order of the same steps for half precision.
INERT = frozenset(
    {"n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"}
    | {"summary_proj_to_labels", "summary_first_dropout"}
)


def read(given: Settings) -> GPTConfig:
    given.expect({"scale_attn_by_inverse_layer_idx": False})
    return GPTConfig(activation=given.activation("activation_function", "gelu_new"), **given.renamed(SETTINGS))


def write(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": activation_word(config.activation),
        **written(config, SETTINGS),
    }


def names(config: GPTConfig) -> NameTable:
    matrices = {
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "feedforward.expand",
        "mlp.c_proj": "feedforward.contract",
    }
    norms = {"ln_1": "attention_norm", "ln_2": "feedforward_norm"}
    here, there, n_layers = "blocks.{}", "transformer.h.{}", config.n_layers
    fused = [
        Rename(
            f"transformer.h.{i}.attn.c_attn.{kind}",
            tuple(f"blocks.{i}.attention.{part}.{kind}" for part in ("query", "key", "value")),
            turn,
        )
        for i in range(n_layers)
        for kind, turn in (("weight", Turn.TRANSPOSED), ("bias", Turn.SAME))
    ]
    return NameTable(
        renames=[
            Rename("transformer.wte.weight", ("embedding.token.weight",)),
            Rename("transformer.wpe.weight", ("embedding.position.table.weight",)),
            *fused,
            *layers(there, here, n_layers=n_layers, parts=matrices, turn=Turn.TRANSPOSED),
            *layers(there, here, n_layers=n_layers, parts=norms),
            *linear("transformer.ln_f", "final_norm"),
            Rename("lm_head.weight", ("unembedding.weight",)),
        ],
        prefix="transformer.",
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    )
