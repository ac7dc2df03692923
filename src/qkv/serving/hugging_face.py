"""Convert `transformers` models and tokenizers to tasks in memory, without downloads."""

import json
import tempfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from qkv.errors import InputError
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq, build
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator
from qkv.text import Tokenizer, load_tokenizer
from qkv.weights.families import config_from_published_with_remarks
from qkv.weights.model_loader import ModelBundle, check_token_ids_within_vocabulary, load_published_weights


@runtime_checkable
class PublishedModel(Protocol):
    """The part of the `transformers.PreTrainedModel` interface that the conversion uses."""

    config: Any

    def state_dict(self) -> dict[str, Tensor]: ...


@runtime_checkable
class PublishedTokenizer(Protocol):
    """The part of the `transformers` tokenizer interface that the conversion uses."""

    def save_pretrained(self, save_directory: str) -> Any: ...  # noqa: ANN401


def task_from_published(model: PublishedModel, tokenizer: PublishedTokenizer, *, name: str) -> Task:
    """Convert a `transformers` model and its tokenizer to a task.

    Unsupported settings raise the same error as when a model folder is loaded.
    """
    # Use only the settings that config.json would contain. All other settings of the config object have default values.
    settings = json.loads(model.config.to_json_string())
    tensors = {key: tensor.detach().float().cpu() for key, tensor in model.state_dict().items()}
    config, remarks = config_from_published_with_remarks(settings, tensors)
    converted = build(config)
    load_published_weights(converted, tensors)
    converted_tokenizer = _convert_tokenizer(tokenizer)
    loaded = ModelBundle(converted.eval(), converted_tokenizer, tuple(remarks))
    check_token_ids_within_vocabulary(loaded, Path(name))
    match loaded.model:
        case GPT():
            return LanguageModel(loaded.model, converted_tokenizer, name=name)
        case BERT():
            return TextEncoder(loaded.model, converted_tokenizer, name=name, remarks=loaded.remarks)
        case Seq2Seq() | RNNSeq2Seq():
            return Translator(loaded.model, converted_tokenizer, name=name)


def _convert_tokenizer(tokenizer: PublishedTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return load_tokenizer(folder)


def check_tokenizer_passed(tokenizer: PublishedTokenizer | None) -> PublishedTokenizer:
    """Return the tokenizer, or raise `InputError` if it is missing."""
    if tokenizer is None:
        raise InputError("a transformers model requires its tokenizer: explore(model, text, tokenizer=…)")
    return tokenizer
