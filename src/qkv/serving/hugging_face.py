"""A model of `transformers` with its tokenizer, as one of ours: converted in memory, nothing is downloaded."""

import json
import tempfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from qkv.errors import InputError
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq, build
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator
from qkv.text import Tokenizer, load_tokenizer
from qkv.weights.families import read_published
from qkv.weights.models import Loaded, check_vocabulary
from qkv.weights.published import load_published


@runtime_checkable
class PublishedModel(Protocol):
    """What is used of `transformers.PreTrainedModel`."""

    config: Any

    def state_dict(self) -> dict[str, Tensor]: ...


@runtime_checkable
class PublishedTokenizer(Protocol):
    """What is used of `transformers`' tokenizers."""

    def save_pretrained(self, save_directory: str) -> Any: ...  # noqa: ANN401


def task_from_published(model: PublishedModel, tokenizer: PublishedTokenizer, *, name: str) -> Task:
    """Refused where it has settings that ours lack, as a folder would be."""
    # As config.json would be written; the object itself holds many settings more, all at their defaults.
    settings = json.loads(model.config.to_json_string())
    tensors = {key: tensor.detach().float().cpu() for key, tensor in model.state_dict().items()}
    config, remarks = read_published(settings, tensors)
    ours = build(config)
    load_published(ours, tensors)
    own = _tokenizer(tokenizer)
    loaded = Loaded(ours.eval(), own, tuple(remarks))
    check_vocabulary(loaded, Path(name))
    match loaded.model:
        case GPT():
            return LanguageModel(loaded.model, own, name=name)
        case BERT():
            return TextEncoder(loaded.model, own, name=name, remarks=loaded.remarks)
        case Seq2Seq() | RNNSeq2Seq():
            return Translator(loaded.model, own, name=name)


def _tokenizer(tokenizer: PublishedTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return load_tokenizer(folder)


def need_tokenizer(tokenizer: PublishedTokenizer | None) -> PublishedTokenizer:
    if tokenizer is None:
        raise InputError("a model of transformers needs its tokenizer: explore(model, text, tokenizer=…)")
    return tokenizer
