"""Map RoBERTa's published config and tensor names to ours.

RoBERTa uses BERT's architecture with a position offset and different heads.
"""

from typing import Any

from qkv.choices import Activation
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.weights import bert
from qkv.weights.encoder_heads import (
    EncoderHead,
    detect_heads_and_add_remarks,
    drop_absent_head_mappings,
    masked_lm_unembedding_mappings,
    pop_encoder_head_settings,
    to_hf_classifier_settings,
)
from qkv.weights.name_table import NameTable, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

ROBERTA_SETTINGS = {key: field for key, field in bert.BERT_SETTINGS.items() if field != "context_length"}
ROBERTA_ARCHITECTURES = {
    "RobertaModel": (EncoderHead.POOLER,),
    "RobertaForMaskedLM": (EncoderHead.MASKED_LM,),
    "RobertaForSequenceClassification": (EncoderHead.POOLER, EncoderHead.CLASSIFIER),
}
ROBERTA_MARKER_TENSORS = {
    EncoderHead.MASKED_LM: "lm_head.dense.weight",
    EncoderHead.CLASSIFIER: "classifier.out_proj.weight",
}


def read_roberta_config(published: PublishedConfig) -> BERTConfig:
    """Convert a published RoBERTa config to our config.

    Positions start after the padding id, so the first rows of the position embedding are unused.
    """
    published.pop_expected_values({"position_embedding_type": "absolute"})
    # The classification head has its own pooler, which has a different name.
    pooler = (
        "classifier.dense.weight"
        if ROBERTA_MARKER_TENSORS[EncoderHead.CLASSIFIER] in published.tensor_names
        else "pooler.dense.weight"
    )
    marker_tensors = {**ROBERTA_MARKER_TENSORS, EncoderHead.POOLER: pooler}
    heads = detect_heads_and_add_remarks(
        published, architectures=ROBERTA_ARCHITECTURES, marker_tensors=marker_tensors, prefix="roberta."
    )
    activation = published.pop_activation("hidden_act", "gelu")
    if EncoderHead.MASKED_LM in heads and activation is not Activation.GELU:
        raise ConfigError(
            f"hidden_act={activation_name(activation)!r} is not supported; RoBERTa's masked-LM head always uses gelu"
        )
    offset = published.pop_int("pad_token_id", 1) + 1
    return BERTConfig(
        activation=activation,
        context_length=published.pop_int("max_position_embeddings", 512) - offset,
        position_offset=offset,
        **pop_encoder_head_settings(heads, published),
        **published.pop_renamed(ROBERTA_SETTINGS),
    )


def to_hf_roberta_config(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "RobertaForSequenceClassification"
    else:
        architecture = "RobertaForMaskedLM" if config.masked_lm_head else "RobertaModel"
    return {
        "architectures": [architecture],
        "hidden_act": activation_name(config.activation),
        "position_embedding_type": "absolute",
        "max_position_embeddings": config.context_length + config.position_offset,
        "pad_token_id": config.position_offset - 1,
        **to_hf_classifier_settings(config),
        **to_published_settings(config, ROBERTA_SETTINGS),
    }


def roberta_name_table(config: BERTConfig) -> NameTable:
    has_classes = config.n_classes is not None
    mappings = [
        *bert.bert_backbone_mappings("roberta", config),
        *weight_and_bias_mappings("classifier.dense" if has_classes else "roberta.pooler.dense", "pooler"),
        *weight_and_bias_mappings("classifier.out_proj", "classifier"),
        *weight_and_bias_mappings("lm_head.dense", "masked_lm.dense"),
        *weight_and_bias_mappings("lm_head.layer_norm", "masked_lm.norm"),
        *masked_lm_unembedding_mappings(config, bias="lm_head.bias", matrix="lm_head.decoder"),
    ]
    return NameTable(
        mappings=drop_absent_head_mappings(config, mappings),
        prefix="roberta.",
        # A model with a classification head does not use the pretrained pooler.
        ignored_patterns=(r"embeddings\.position_ids", *([r"pooler\.dense\.(weight|bias)"] if has_classes else [])),
    )
