"""Map the published config and tensor names of BERT and its heads to ours."""

from typing import Any

from qkv.config import BERTConfig
from qkv.weights.encoder_heads import (
    EncoderHead,
    detect_heads_and_add_remarks,
    drop_absent_head_mappings,
    masked_lm_unembedding_mappings,
    pop_encoder_head_settings,
    to_hf_classifier_settings,
)
from qkv.weights.name_table import NameMapping, NameTable, linear_mappings_per_layer, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig, activation_name, to_published_settings

BERT_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "type_vocab_size": "n_segments",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "hidden_dropout_prob": "dropout",
    "initializer_range": "init_std",
}
# Google's conversions of the multilingual models contain these unused settings.
BERT_IGNORED_KEYS = frozenset(
    {"directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers"}
    | {"pooler_num_attention_heads", "pooler_size_per_head"}
)
BERT_ARCHITECTURES = {
    "BertModel": (EncoderHead.POOLER,),
    "BertForPreTraining": (EncoderHead.POOLER, EncoderHead.MASKED_LM, EncoderHead.NEXT_SENTENCE),
    "BertForMaskedLM": (EncoderHead.MASKED_LM,),
    "BertForNextSentencePrediction": (EncoderHead.POOLER, EncoderHead.NEXT_SENTENCE),
    "BertForSequenceClassification": (EncoderHead.POOLER, EncoderHead.CLASSIFIER),
}
BERT_MARKER_TENSORS = {
    EncoderHead.POOLER: "pooler.dense.weight",
    EncoderHead.MASKED_LM: "cls.predictions.transform.dense.weight",
    EncoderHead.NEXT_SENTENCE: "cls.seq_relationship.weight",
    EncoderHead.CLASSIFIER: "classifier.weight",
}


def read_bert_config(published: PublishedConfig) -> BERTConfig:
    published.pop_expected_values({"position_embedding_type": "absolute"})
    heads = detect_heads_and_add_remarks(
        published, architectures=BERT_ARCHITECTURES, marker_tensors=BERT_MARKER_TENSORS, prefix="bert."
    )
    return BERTConfig(
        activation=published.pop_activation("hidden_act", "gelu"),
        **pop_encoder_head_settings(heads, published),
        **published.pop_renamed(BERT_SETTINGS),
    )


def to_hf_bert_config(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "BertForSequenceClassification"
    elif config.masked_lm_head:
        architecture = "BertForPreTraining" if config.next_sentence_head else "BertForMaskedLM"
    else:
        architecture = "BertForNextSentencePrediction" if config.next_sentence_head else "BertModel"
    return {
        "architectures": [architecture],
        "hidden_act": activation_name(config.activation),
        "position_embedding_type": "absolute",
        **to_hf_classifier_settings(config),
        **to_published_settings(config, BERT_SETTINGS),
    }


def bert_name_table(config: BERTConfig) -> NameTable:
    mappings = [
        *bert_backbone_mappings("bert", config),
        *weight_and_bias_mappings("bert.pooler.dense", "pooler"),
        *weight_and_bias_mappings("cls.predictions.transform.dense", "masked_lm.dense"),
        *weight_and_bias_mappings("cls.predictions.transform.LayerNorm", "masked_lm.norm"),
        *masked_lm_unembedding_mappings(config, bias="cls.predictions.bias", matrix="cls.predictions.decoder"),
        *weight_and_bias_mappings("cls.seq_relationship", "next_sentence"),
        *weight_and_bias_mappings("classifier", "classifier"),
    ]
    return NameTable(
        mappings=drop_absent_head_mappings(config, mappings),
        prefix="bert.",
        legacy_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ignored_patterns=(r"embeddings\.position_ids",),
    )


def bert_backbone_mappings(prefix: str, config: BERTConfig) -> list[NameMapping]:
    """Return the name mappings for the backbone tensors that BERT and RoBERTa share."""
    parts = {
        "attention.self.query": "attention.q_proj",
        "attention.self.key": "attention.k_proj",
        "attention.self.value": "attention.v_proj",
        "attention.output.dense": "attention.out_proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "feed_forward.up_proj",
        "output.dense": "feed_forward.down_proj",
        "output.LayerNorm": "feed_forward_norm",
    }
    return [
        NameMapping(f"{prefix}.embeddings.word_embeddings.weight", ("embedding.token.weight",)),
        NameMapping(f"{prefix}.embeddings.position_embeddings.weight", ("embedding.position.table.weight",)),
        NameMapping(f"{prefix}.embeddings.token_type_embeddings.weight", ("embedding.segment.weight",)),
        *weight_and_bias_mappings(f"{prefix}.embeddings.LayerNorm", "embedding.norm"),
        *linear_mappings_per_layer(prefix + ".encoder.layer.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
    ]
