"""Map DistilBERT's published config and tensor names to ours.

Unlike BERT, DistilBERT has no segment embedding, and its pooler uses ReLU instead of tanh.
"""

from typing import Any

from qkv.choices import PoolerActivation
from qkv.config import BERTConfig
from qkv.weights.encoder_heads import (
    EncoderHead,
    detect_heads_and_add_remarks,
    drop_absent_head_mappings,
    pop_encoder_head_settings,
    to_hf_classifier_settings,
)
from qkv.weights.name_table import NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

DISTILBERT_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "dim": "d_model",
    "hidden_dim": "d_ff",
    "n_layers": "n_layers",
    "n_heads": "n_heads",
    "tie_word_embeddings": "tie_embeddings",
    "dropout": "dropout",
    "initializer_range": "init_std",
}
# `sinusoidal_pos_embds` only affects how the position embedding is initialized. The trained values are in the file.
DISTILBERT_IGNORED_KEYS = frozenset({"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"})
DISTILBERT_ARCHITECTURES = {
    "DistilBertModel": (),
    "DistilBertForMaskedLM": (EncoderHead.MASKED_LM,),
    "DistilBertForSequenceClassification": (EncoderHead.POOLER, EncoderHead.CLASSIFIER),
}
DISTILBERT_MARKER_TENSORS = {
    EncoderHead.POOLER: "pre_classifier.weight",
    EncoderHead.MASKED_LM: "vocab_transform.weight",
    EncoderHead.CLASSIFIER: "classifier.weight",
}


def read_distilbert_config(published: PublishedConfig) -> BERTConfig:
    heads = detect_heads_and_add_remarks(
        published,
        architectures=DISTILBERT_ARCHITECTURES,
        marker_tensors=DISTILBERT_MARKER_TENSORS,
        prefix="distilbert.",
    )
    return BERTConfig(
        activation=published.pop_activation("activation", "gelu"),
        n_segments=0,
        pooler_activation=PoolerActivation.RELU,
        **pop_encoder_head_settings(heads, published),
        **published.pop_renamed(DISTILBERT_SETTINGS),
    )


def to_hf_distilbert_config(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "DistilBertForSequenceClassification"
    else:
        architecture = "DistilBertForMaskedLM" if config.masked_lm_head else "DistilBertModel"
    return {
        "architectures": [architecture],
        "activation": activation_name(config.activation),
        **to_hf_classifier_settings(config),
        **to_published_settings(config, DISTILBERT_SETTINGS),
    }


def distilbert_name_table(config: BERTConfig) -> NameTable:
    parts = {
        "attention.q_lin": "attention.q_proj",
        "attention.k_lin": "attention.k_proj",
        "attention.v_lin": "attention.v_proj",
        "attention.out_lin": "attention.out_proj",
        "sa_layer_norm": "attention_norm",
        "ffn.lin1": "feed_forward.up_proj",
        "ffn.lin2": "feed_forward.down_proj",
        "output_layer_norm": "feed_forward_norm",
    }
    mappings = [
        NameMapping("distilbert.embeddings.word_embeddings.weight", ("embedding.token.weight",)),
        NameMapping("distilbert.embeddings.position_embeddings.weight", ("embedding.position.table.weight",)),
        *weight_and_bias_mappings("distilbert.embeddings.LayerNorm", "embedding.norm"),
        *linear_mappings_per_layer(
            "distilbert.transformer.layer.{}", "blocks.{}", n_layers=config.n_layers, parts=parts
        ),
        *weight_and_bias_mappings("pre_classifier", "pooler"),
        *weight_and_bias_mappings("classifier", "classifier"),
        *weight_and_bias_mappings("vocab_transform", "masked_lm.dense"),
        *weight_and_bias_mappings("vocab_layer_norm", "masked_lm.norm"),
        *weight_and_bias_mappings("vocab_projector", "masked_lm.unembedding"),
    ]
    return NameTable(
        mappings=drop_absent_head_mappings(config, mappings),
        prefix="distilbert.",
        ignored_patterns=(r"embeddings\.position_ids",),
    )
