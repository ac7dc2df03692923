"""BERT's published names and settings, with the heads that its files hold."""

from typing import Any

from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.weights.settings import Settings, activation_word, written
from qkv.weights.tensors import NameTable, Rename, layers, linear

SETTINGS = {
    "vocab_size": "vocabulary_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "type_vocab_size": "n_segments",
    "layer_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "hidden_dropout_prob": "dropout",
    "initializer_range": "initial_std",
}
# What Google's conversions of the multilingual models carry along; nothing reads it.
INERT = frozenset(
    {"directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers"}
    | {"pooler_num_attention_heads", "pooler_size_per_head"}
)
HEADS = {
    "BertModel": ("pooler",),
    "BertForPreTraining": ("pooler", "masked_word", "next_sentence"),
    "BertForMaskedLM": ("masked_word",),
    "BertForNextSentencePrediction": ("pooler", "next_sentence"),
    "BertForSequenceClassification": ("pooler", "classifier"),
}
_TELLING = {
    "pooler": "pooler.dense.weight",
    "masked_word": "cls.predictions.transform.dense.weight",
    "next_sentence": "cls.seq_relationship.weight",
    "classifier": "classifier.weight",
}


def read(given: Settings) -> BERTConfig:
    given.expect({"position_embedding_type": "absolute"})
    heads = _heads(given)
    n_classes = len(given.take_table("id2label")) or given.take("num_labels", 2)
    return BERTConfig(
        activation=given.activation("hidden_act", "gelu"),
        pooler="pooler" in heads,
        masked_word_head="masked_word" in heads,
        next_sentence_head="next_sentence" in heads,
        n_classes=n_classes if "classifier" in heads else None,
        **given.renamed(SETTINGS),
    )


def _heads(given: Settings) -> tuple[str, ...]:
    """From the tensors where they are known: a file often holds other heads than its config says."""
    match given.take("architectures", []):
        case []:
            architecture = "BertModel"
        case [str(architecture), *_] if architecture in HEADS:
            pass
        case others:
            raise ConfigError(f"architectures={others!r} is not supported; known: {', '.join(HEADS)}")
    if not given.tensor_names:
        return HEADS[architecture]
    bare = {name.removeprefix("bert.") for name in given.tensor_names}
    return tuple(head for head, name in _TELLING.items() if name in bare)


def write(config: BERTConfig) -> dict[str, Any]:
    labels = {}
    if config.n_classes is not None:
        architecture = "BertForSequenceClassification"
        labels = {str(i): f"LABEL_{i}" for i in range(config.n_classes)}
    elif config.masked_word_head:
        architecture = "BertForPreTraining" if config.next_sentence_head else "BertForMaskedLM"
    else:
        architecture = "BertForNextSentencePrediction" if config.next_sentence_head else "BertModel"
    return {
        "architectures": [architecture],
        "hidden_act": activation_word(config.activation),
        "position_embedding_type": "absolute",
        **({"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}} if labels else {}),
        **written(config, SETTINGS),
    }


def names(config: BERTConfig) -> NameTable:
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
    return NameTable(
        renames=[
            Rename("bert.embeddings.word_embeddings.weight", ("embedding.token.weight",)),
            Rename("bert.embeddings.position_embeddings.weight", ("embedding.position.table.weight",)),
            Rename("bert.embeddings.token_type_embeddings.weight", ("embedding.segment.weight",)),
            *linear("bert.embeddings.LayerNorm", "embedding.norm"),
            *layers("bert.encoder.layer.{}", "blocks.{}", n_layers=config.n_layers, parts=parts),
            *_names_of_heads(config),
        ],
        prefix="bert.",
        old_spelling={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        ignored=(r"embeddings\.position_ids",),
    )


def _names_of_heads(config: BERTConfig) -> list[Rename]:
    heads = {
        "pooler": config.pooler,
        "masked_word": config.masked_word_head,
        "next_sentence": config.next_sentence_head,
        "classifier": config.n_classes is not None,
    }
    # One bias under two names. A tied decoder is never written, so the bias stands by itself.
    unembedding = [
        Rename("cls.predictions.bias", ("masked_word.unembedding.bias",)),
        *linear("cls.predictions.decoder", "masked_word.unembedding"),
    ]
    lines = {
        "pooler": linear("bert.pooler.dense", "pooler"),
        "masked_word": [
            *linear("cls.predictions.transform.dense", "masked_word.dense"),
            *linear("cls.predictions.transform.LayerNorm", "masked_word.norm"),
            *(unembedding if config.tie_embeddings else reversed(unembedding)),
        ],
        "next_sentence": linear("cls.seq_relationship", "next_sentence"),
        "classifier": linear("classifier", "classifier"),
    }
    return [rename for head, is_there in heads.items() if is_there for rename in lines[head]]
