"""DistilBERT's published names and settings: no segments, and ReLU before the classes where BERT has tanh."""

from typing import Any

from qkv.choices import PoolerActivation
from qkv.config import BERTConfig
from qkv.weights.heads import Head, head_settings, heads_in, those_of, written_classes
from qkv.weights.names import NameTable, Rename, layers, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {
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
# Sinusoids are only what its position table starts from; the table is in the file.
INERT = frozenset({"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"})
ARCHITECTURES = {
    "DistilBertModel": (),
    "DistilBertForMaskedLM": (Head.MASKED_WORD,),
    "DistilBertForSequenceClassification": (Head.POOLER, Head.CLASSES),
}
TELLING = {
    Head.POOLER: "pre_classifier.weight",
    Head.MASKED_WORD: "vocab_transform.weight",
    Head.CLASSES: "classifier.weight",
}


def read(given: Settings) -> BERTConfig:
    heads = heads_in(given, architectures=ARCHITECTURES, telling=TELLING, prefix="distilbert.")
    return BERTConfig(
        activation=given.activation("activation", "gelu"),
        n_segments=0,
        pooler_activation=PoolerActivation.RELU,
        **head_settings(heads, given),
        **given.renamed(SETTINGS),
    )


def write(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "DistilBertForSequenceClassification"
    else:
        architecture = "DistilBertForMaskedLM" if config.masked_word_head else "DistilBertModel"
    return {
        "architectures": [architecture],
        "activation": activation_word(config.activation),
        **written_classes(config),
        **written(config, SETTINGS),
    }


def names(config: BERTConfig) -> NameTable:
    parts = {
        "attention.q_lin": "attention.query",
        "attention.k_lin": "attention.key",
        "attention.v_lin": "attention.value",
        "attention.out_lin": "attention.output",
        "sa_layer_norm": "attention_norm",
        "ffn.lin1": "feedforward.expand",
        "ffn.lin2": "feedforward.contract",
        "output_layer_norm": "feedforward_norm",
    }
    lines = [
        Rename("distilbert.embeddings.word_embeddings.weight", ("embedding.token.weight",)),
        Rename("distilbert.embeddings.position_embeddings.weight", ("embedding.position.table.weight",)),
        *linear("distilbert.embeddings.LayerNorm", "embedding.norm"),
        *layers("distilbert.transformer.layer.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
        *linear("pre_classifier", "pooler"),
        *linear("classifier", "classifier"),
        *linear("vocab_transform", "masked_word.dense"),
        *linear("vocab_layer_norm", "masked_word.norm"),
        *linear("vocab_projector", "masked_word.unembedding"),
    ]
    return NameTable(
        renames=those_of(config, lines),
        prefix="distilbert.",
        ignored=(r"embeddings\.position_ids",),
    )
