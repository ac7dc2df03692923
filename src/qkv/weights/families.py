"""Which published model is which: from `model_type` to a config and a name table, and back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qkv.choices import PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.config.base import nearest
from qkv.errors import ConfigError, WeightsError
from qkv.weights import bart, bert, distilbert, gpt2, llama, marian, roberta, t5
from qkv.weights.names import NameTable
from qkv.weights.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one `model_type` is read and written."""

    read: Callable[[Settings], Any]
    write: Callable[[Any], dict[str, Any]]
    names: Callable[[Any], NameTable]
    inert: frozenset[str] = frozenset()
    """Keys of its published config that change nothing."""


FAMILIES = {
    "gpt2": Family(read=gpt2.read, write=gpt2.write, names=gpt2.names, inert=gpt2.INERT),
    "llama": Family(read=llama.read, write=llama.write, names=llama.names, inert=llama.INERT),
    "mistral": Family(read=llama.read_mistral, write=llama.write_mistral, names=llama.names),
    "bert": Family(read=bert.read, write=bert.write, names=bert.names, inert=bert.INERT),
    "distilbert": Family(read=distilbert.read, write=distilbert.write, names=distilbert.names, inert=distilbert.INERT),
    "roberta": Family(read=roberta.read, write=roberta.write, names=roberta.names),
    "marian": Family(read=marian.read, write=marian.write, names=marian.names, inert=bart.INERT),
    "bart": Family(read=bart.read, write=bart.write, names=bart.names, inert=bart.INERT),
    "t5": Family(read=t5.read, write=t5.write, names=t5.names),
}


BESIDE = frozenset({"sentence_embedding"})
"""Settings that others keep in files beside `config.json`."""


def config_from_published(settings: Mapping[str, Any], tensor_names: Iterable[str] = ()) -> ModelConfig:
    """Our config for a published `config.json`; a setting that our models lack is refused, never ignored.

    `tensor_names`: what the weights file holds, where it is at hand. It tells what the settings leave open: which
    heads a BERT has, whether a T5 is tied and a BART has its bias. Of several dropouts the residual stream's
    is taken.
    """
    return read_published(settings, tensor_names)[0]


def read_published(settings: Mapping[str, Any], tensor_names: Iterable[str]) -> tuple[ModelConfig, list[str]]:
    """As `config_from_published`, with remarks: heads that the settings promise and the file lacks."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = nearest(str(model_type), list(FAMILIES))
        raise ConfigError(f"model_type={model_type!r} is unknown; known: {', '.join(FAMILIES)}{hint}")
    family = FAMILIES[model_type]
    given = Settings(settings, tensor_names=frozenset(tensor_names))
    try:
        config = family.read(given)
    except ConfigError as error:
        raise ConfigError(given.in_their_words(str(error))) from None
    given.finish(inert=family.inert)
    return config, given.remarks


def published_from_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that others read; refused where it would not say everything that ours says."""
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    settings = {"model_type": model_type, **family.write(config)}
    back = config_from_published(settings, (rename.theirs for rename in family.names(config).renames))
    lost = [
        f"{name}={getattr(config, name)}"
        for name in type(config).model_fields
        if name not in BESIDE and getattr(config, name) != getattr(back, name)
    ]
    if lost:
        raise ConfigError(f"a published {model_type} cannot have {', '.join(lost)}")
    return settings


def name_table(config: ModelConfig) -> NameTable:
    return FAMILIES[_model_type(config)].names(config)


def _model_type(config: ModelConfig) -> str:
    match config:
        case GPTConfig(positions=PositionKind.ROTARY):
            return "llama" if config.sliding_window is None else "mistral"
        case GPTConfig():
            return "gpt2"
        case BERTConfig():
            kind = "bert" if config.position_offset == 0 else "roberta"
            return kind if config.n_segments else "distilbert"
        case Seq2SeqConfig(positions=PositionKind.RELATIVE):
            return "t5"
        case Seq2SeqConfig(positions=PositionKind.LEARNED):
            return "bart"
        case Seq2SeqConfig():
            return "marian"
        case RNNConfig():
            raise WeightsError("an RNN with attention has no published form")
