"""RoBERTa's published names and settings: BERT's backbone, positions counted from the padding's id, other heads."""

from typing import Any

from qkv.choices import Activation
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.weights import bert
from qkv.weights.heads import Head, head_settings, heads_in, those_of, unembedding, written_classes
from qkv.weights.names import NameTable, linear
from qkv.weights.settings import Settings, activation_word, written

SETTINGS = {theirs: ours for theirs, ours in bert.SETTINGS.items() if ours != "context_length"}
ARCHITECTURES = {
    "RobertaModel": (Head.POOLER,),
    "RobertaForMaskedLM": (Head.MASKED_WORD,),
    "RobertaForSequenceClassification": (Head.POOLER, Head.CLASSES),
}
TELLING = {Head.MASKED_WORD: "lm_head.dense.weight", Head.CLASSES: "classifier.out_proj.weight"}


def read(given: Settings) -> BERTConfig:
    """The rows before position 0 end with the padding's own, which nothing reads."""
    given.expect({"position_embedding_type": "absolute"})
    # The classification head brings a pooler of its own, under another name.
    pooler = "classifier.dense.weight" if TELLING[Head.CLASSES] in given.tensor_names else "pooler.dense.weight"
    telling = {**TELLING, Head.POOLER: pooler}
    heads = heads_in(given, architectures=ARCHITECTURES, telling=telling, prefix="roberta.")
    activation = given.activation("hidden_act", "gelu")
    if Head.MASKED_WORD in heads and activation is not Activation.GELU:
        raise ConfigError(f"hidden_act={activation_word(activation)!r}: RoBERTa's masked-word head has gelu always")
    offset = given.take_number("pad_token_id", 1) + 1
    return BERTConfig(
        activation=activation,
        context_length=given.take_number("max_position_embeddings", 512) - offset,
        position_offset=offset,
        **head_settings(heads, given),
        **given.renamed(SETTINGS),
    )


def write(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is not None:
        architecture = "RobertaForSequenceClassification"
    else:
        architecture = "RobertaForMaskedLM" if config.masked_word_head else "RobertaModel"
    return {
        "architectures": [architecture],
        "hidden_act": activation_word(config.activation),
        "position_embedding_type": "absolute",
        "max_position_embeddings": config.context_length + config.position_offset,
        "pad_token_id": config.position_offset - 1,
        **written_classes(config),
        **written(config, SETTINGS),
    }


def names(config: BERTConfig) -> NameTable:
    has_classes = config.n_classes is not None
    lines = [
        *bert.backbone("roberta", config),
        *linear("classifier.dense" if has_classes else "roberta.pooler.dense", "pooler"),
        *linear("classifier.out_proj", "classifier"),
        *linear("lm_head.dense", "masked_word.dense"),
        *linear("lm_head.layer_norm", "masked_word.norm"),
        *unembedding(config, bias="lm_head.bias", matrix="lm_head.decoder"),
    ]
    return NameTable(
        renames=those_of(config, lines),
        prefix="roberta.",
        # Beside a classification head, which has its own, pre-training's pooler is read by nothing.
        ignored=(r"embeddings\.position_ids", *([r"pooler\.dense\.(weight|bias)"] if has_classes else [])),
    )
