"""Map GPT-2's published config and tensor names to ours.

GPT-2's published weight matrices have the layout (in, out). One matrix combines the query, key and value projections.
"""

from typing import Any

from qkv.config import GPTConfig
from qkv.weights.name_table import Layout, NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

GPT2_SETTINGS = {
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
# Settings for a multiple-choice head, an old duplicate of n_positions, and the order of operations in half precision.
GPT2_IGNORED_KEYS = frozenset(
    {"n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"}
    | {"summary_proj_to_labels", "summary_first_dropout"}
)


def read_gpt2_config(published: PublishedConfig) -> GPTConfig:
    published.pop_expected_values({"scale_attn_by_inverse_layer_idx": False})
    return GPTConfig(
        activation=published.pop_activation("activation_function", "gelu_new"), **published.pop_renamed(GPT2_SETTINGS)
    )


def to_hf_gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": activation_name(config.activation),
        **to_published_settings(config, GPT2_SETTINGS),
    }


def gpt2_name_table(config: GPTConfig) -> NameTable:
    matrices = {
        "attn.c_proj": "attention.out_proj",
        "mlp.c_fc": "feed_forward.up_proj",
        "mlp.c_proj": "feed_forward.down_proj",
    }
    norms = {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}
    module, published, n_layers = "blocks.{}", "transformer.h.{}", config.n_layers
    fused = [
        NameMapping(
            f"transformer.h.{i}.attn.c_attn.{kind}",
            tuple(f"blocks.{i}.attention.{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj")),
            layout,
        )
        for i in range(n_layers)
        for kind, layout in (("weight", Layout.TRANSPOSED), ("bias", Layout.SAME))
    ]
    return NameTable(
        mappings=[
            NameMapping("transformer.wte.weight", ("embedding.token.weight",)),
            NameMapping("transformer.wpe.weight", ("embedding.position.table.weight",)),
            *fused,
            *linear_mappings_per_layer(published, module, n_layers=n_layers, parts=matrices, layout=Layout.TRANSPOSED),
            *linear_mappings_per_layer(published, module, n_layers=n_layers, parts=norms),
            *weight_and_bias_mappings("transformer.ln_f", "final_norm"),
            NameMapping("lm_head.weight", ("unembedding.weight",)),
        ],
        prefix="transformer.",
        ignored_patterns=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    )
