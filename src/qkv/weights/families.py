"""Convert published configs to ours and back, based on their `model_type`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qkv.choices import PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.config.base import did_you_mean_suffix
from qkv.errors import ConfigError, WeightsError
from qkv.weights import bart, bert, distilbert, gpt2, llama, marian, roberta, t5
from qkv.weights.name_table import NameTable
from qkv.weights.published_config import PublishedConfig


@dataclass(frozen=True, kw_only=True)
class PublishedFamily:
    """The functions that convert the config and tensor names of one `model_type`."""

    read_config: Callable[[PublishedConfig], Any]
    write_config: Callable[[Any], dict[str, Any]]
    name_table: Callable[[Any], NameTable]
    ignored_keys: frozenset[str] = frozenset()
    """The keys of the published config that have no effect."""


PUBLISHED_FAMILIES = {
    "gpt2": PublishedFamily(
        read_config=gpt2.read_gpt2_config,
        write_config=gpt2.to_hf_gpt2_config,
        name_table=gpt2.gpt2_name_table,
        ignored_keys=gpt2.GPT2_IGNORED_KEYS,
    ),
    "llama": PublishedFamily(
        read_config=llama.read_llama_config,
        write_config=llama.to_hf_llama_config,
        name_table=llama.llama_name_table,
        ignored_keys=llama.LLAMA_IGNORED_KEYS,
    ),
    "mistral": PublishedFamily(
        read_config=llama.read_mistral_config,
        write_config=llama.to_hf_mistral_config,
        name_table=llama.llama_name_table,
    ),
    "bert": PublishedFamily(
        read_config=bert.read_bert_config,
        write_config=bert.to_hf_bert_config,
        name_table=bert.bert_name_table,
        ignored_keys=bert.BERT_IGNORED_KEYS,
    ),
    "distilbert": PublishedFamily(
        read_config=distilbert.read_distilbert_config,
        write_config=distilbert.to_hf_distilbert_config,
        name_table=distilbert.distilbert_name_table,
        ignored_keys=distilbert.DISTILBERT_IGNORED_KEYS,
    ),
    "roberta": PublishedFamily(
        read_config=roberta.read_roberta_config,
        write_config=roberta.to_hf_roberta_config,
        name_table=roberta.roberta_name_table,
    ),
    "marian": PublishedFamily(
        read_config=marian.read_marian_config,
        write_config=marian.to_hf_marian_config,
        name_table=marian.marian_name_table,
        ignored_keys=bart.BART_IGNORED_KEYS,
    ),
    "bart": PublishedFamily(
        read_config=bart.read_bart_config,
        write_config=bart.to_hf_bart_config,
        name_table=bart.bart_name_table,
        ignored_keys=bart.BART_IGNORED_KEYS,
    ),
    "t5": PublishedFamily(read_config=t5.read_t5_config, write_config=t5.to_hf_t5_config, name_table=t5.t5_name_table),
}

SEPARATE_SETTINGS = frozenset({"sentence_embedding"})
"""The settings in our config that published models store in files other than `config.json`."""


def config_from_published(settings: Mapping[str, Any], tensor_names: Iterable[str] = ()) -> ModelConfig:
    """Convert a published `config.json` to our config, and raise an error for any unsupported setting.

    `tensor_names` are the tensor names in the weights file, if available. They determine what the settings do not
    specify: which heads a BERT has, whether a T5 has tied embeddings, and whether a BART has a logit bias. If the
    published config contains several dropout rates, our config uses the rate for the residual stream.
    """
    return config_from_published_with_remarks(settings, tensor_names)[0]


def config_from_published_with_remarks(
    settings: Mapping[str, Any], tensor_names: Iterable[str]
) -> tuple[ModelConfig, list[str]]:
    """Convert a published config like `config_from_published`, and also return notes for the user.

    For example, a note lists a head that the config specifies but the weights do not contain.
    """
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in PUBLISHED_FAMILIES:
        hint = did_you_mean_suffix(str(model_type), list(PUBLISHED_FAMILIES))
        raise ConfigError(
            f"model_type={model_type!r} is not supported{hint}; supported types: {', '.join(PUBLISHED_FAMILIES)}"
        )
    family = PUBLISHED_FAMILIES[model_type]
    published = PublishedConfig(settings, tensor_names=frozenset(tensor_names))
    try:
        config = family.read_config(published)
    except ConfigError as error:
        raise ConfigError(published.use_published_names(str(error))) from None
    published.reject_unknown(ignored_keys=family.ignored_keys)
    return config, published.remarks


def to_lossless_published_config(config: ModelConfig) -> dict[str, Any]:
    """Convert our config to the settings in a published `config.json`.

    Raises an error if the published format cannot represent all of our settings.
    """
    model_type = _published_model_type(config)
    family = PUBLISHED_FAMILIES[model_type]
    settings = {"model_type": model_type, **family.write_config(config)}
    # Convert the published settings back to find any settings that would be lost.
    restored = config_from_published(settings, (mapping.published for mapping in family.name_table(config).mappings))
    lost = [
        f"{name}={getattr(config, name)}"
        for name in type(config).model_fields
        if name not in SEPARATE_SETTINGS and getattr(config, name) != getattr(restored, name)
    ]
    if lost:
        raise ConfigError(f"Hugging Face's {model_type} format does not support {', '.join(lost)}")
    return settings


def name_table_for(config: ModelConfig) -> NameTable:
    """Return the table that maps published tensor names to our parameter names for a model with this config."""
    return PUBLISHED_FAMILIES[_published_model_type(config)].name_table(config)


def _published_model_type(config: ModelConfig) -> str:
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
            raise WeightsError("an RNN with attention has no published format")
