"""BERT's published names and settings, with the heads that its files hold."""

from typing import Any

from qkv.config import BERTConfig
from qkv.weights.heads import Head, head_settings, heads_in, those_of, unembedding, written_classes
from qkv.weights.names import NameTable, Rename, layers, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {
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
# What Google's conversions of the multilingual models carry along; nothing reads it.
INERT = frozenset(
    {"directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers"}
    | {"pooler_num_attention_heads", "pooler_size_per_head"}
)
ARCHITECTURES = {
    "BertModel": (Head.POOLER,),
    "BertForPreTraining": (Head.POOLER, Head.MASKED_WORD, Head.NEXT_SENTENCE),
    "BertForMaskedLM": (Head.MASKED_WORD,),
    "BertForNextSentencePrediction": (Head.POOLER, Head.NEXT_SENTENCE),
    "BertForSequenceClassification": (Head.POOLER, Head.CLASSES),
}
TELLING = {
    Head.POOLER: "pooler.dense.weight",
    Head.MASKED_WORD: "cls.predictions.transform.dense.weight",
    Head.NEXT_SENTENCE: "cls.seq_relationship.weight",
    Head.CLASSES: "classifier.weight",
}


def read(given: Settings) -> BERTConfig:
    given.expect({"position_embedding_type": "absolute"})
    heads = heads_in(given, architectures=ARCHITECTURES, telling=TELLING, prefix="bert.")
    return BERTConfig(
        activation=given.activation("hidden_act", "gelu"),
        **head_settings(heads, given),
        **given.renamed(SETTINGS),
    )


def write(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "BertForSequenceClassification"
    elif config.masked_word_head:
        architecture = "BertForPreTraining" if config.next_sentence_head else "BertForMaskedLM"
    else:
        architecture = "BertForNextSentencePrediction" if config.next_sentence_head else "BertModel"
    return {
        "architectures": [architecture],
        "hidden_act": activation_word(config.activation),
        "position_embedding_type": "absolute",
        **written_classes(config),
        **written(config, SETTINGS),
    }


def names(config: BERTConfig) -> NameTable:
    lines = [
        *backbone("bert", config),
        *linear("bert.pooler.dense", "pooler"),
        *linear("cls.predictions.transform.dense", "masked_word.dense"),
        *linear("cls.predictions.transform.LayerNorm", "masked_word.norm"),
        *unembedding(config, bias="cls.predictions.bias", matrix="cls.predictions.decoder"),
        *linear("cls.seq_relationship", "next_sentence"),
        *linear("classifier", "classifier"),
    ]
    return NameTable(
        renames=those_of(config, lines),
        prefix="bert.",
        old_spelling={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ignored=(r"embeddings\.position_ids",),
    )


def backbone(prefix: str, config: BERTConfig) -> list[Rename]:
    """RoBERTa has the same parts by the same names."""
    parts = {
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "feedforward.expand",
        "output.dense": "feedforward.contract",
        "output.LayerNorm": "feedforward_norm",
    }
    return [
        Rename(f"{prefix}.embeddings.word_embeddings.weight", ("embedding.token.weight",)),
        Rename(f"{prefix}.embeddings.position_embeddings.weight", ("embedding.position.table.weight",)),
        Rename(f"{prefix}.embeddings.token_type_embeddings.weight", ("embedding.segment.weight",)),
        *linear(f"{prefix}.embeddings.LayerNorm", "embedding.norm"),
        *layers(prefix + ".encoder.layer.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
    ]
