"""How does a model leave: in a folder of our own, whole or as int8, or in the folder that `transformers` loads?"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.choices import Role
from qkv.config import BERTConfig
from qkv.errors import InputError
from qkv.models import Seq2Seq
from qkv.text import Tokenizer, tokenizer_files
from qkv.text.files import CONFIG_FILE
from qkv.weights.decoding import GENERATION_FILE
from qkv.weights.families import published_from_config
from qkv.weights.folder import write_folder
from qkv.weights.int8 import INT8_ROWS, STORAGE_KEY, to_int8
from qkv.weights.models import SINGLE, SOURCE_TOKENIZER, Loaded, own_names
from qkv.weights.published import to_published
from qkv.weights.sentence_transformers import sentence_files
from qkv.weights.tensors import published


class Numbers(StrEnum):
    """How the numbers of a weights file are stored."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    """GGUF's: 32 whole numbers of one byte share a 16-bit scale."""

    @property
    def dtype(self) -> torch.dtype:
        if self is Numbers.Q8_0:
            raise InputError("q8_0 is a kind of number that GGUF files alone have")
        return torch.float32 if self is Numbers.F32 else torch.float16


def save_own(loaded: Loaded, target: Path) -> None:
    """Our own folder, each number as it is; `load_model` brings it back."""
    write_folder(
        new_folder(target), tensors={SINGLE: published(loaded.model, own_names(loaded.model))}, texts=_own_texts(loaded)
    )


def save_int8(loaded: Loaded, target: Path) -> None:
    """Our own folder with a byte for each weight of a matrix."""
    write_folder(
        new_folder(target),
        tensors={SINGLE: to_int8(published(loaded.model, own_names(loaded.model)))},
        texts=_own_texts(loaded),
        metadata={STORAGE_KEY: INT8_ROWS},
    )


def _own_texts(loaded: Loaded) -> dict[str, str]:
    texts = {"config.json": _json(loaded.model.config.model_dump(mode="json", exclude_none=True))}
    if said := loaded.decoding.settings():
        texts[GENERATION_FILE] = _json(said)
    if loaded.source_tokenizer is not None:
        texts[SOURCE_TOKENIZER] = loaded.source_tokenizer.backend.to_str()
    return {**texts, **_tokenizer_texts(loaded.tokenizer)}


def save_hf(loaded: Loaded, target: Path, *, numbers: Numbers = Numbers.F32) -> None:
    """The folder that `AutoModel…` and `AutoTokenizer` load, with names and settings as published."""
    tokenizer = _one_tokenizer(loaded)
    ids = {**token_ids(tokenizer), **beginning(loaded)}
    # RoBERTa counts positions from the padding's id, so what the config says of it stands.
    settings = {**ids, **published_from_config(loaded.model.config), "dtype": str(numbers.dtype).removeprefix("torch.")}
    texts = {"config.json": _json(settings), **_tokenizer_texts(tokenizer)}
    if isinstance(loaded.model.config, BERTConfig):
        texts |= {**_encoder_tokenizer(texts, loaded.model.config), **sentence_files(loaded.model.config)}
    else:
        texts[GENERATION_FILE] = _json(ids)
    write_folder(new_folder(target), tensors={SINGLE: _as(to_published(loaded.model), numbers.dtype)}, texts=texts)


def _one_tokenizer(loaded: Loaded) -> Tokenizer | None:
    """The source's, where it spells every id as the target's does: the folder has room for one."""
    target, source = loaded.tokenizer, loaded.source_tokenizer
    if target is None or source is None:
        return target
    if source.backend.get_vocab() != target.backend.get_vocab():
        sizes = f"{source.vocab_size} and {target.vocab_size}"
        raise InputError(
            f"--to hf writes one tokenizer; source and target have vocabularies of their own ({sizes} ids)"
        )
    return source


def beginning(loaded: Loaded) -> dict[str, Any]:
    """How an encoder–decoder's text begins, which the settings of ours leave to the tokenizer."""
    if not isinstance(loaded.model, Seq2Seq) or loaded.tokenizer is None:
        return {}
    begin = loaded.tokenizer.find(Role.BEGIN)
    first = loaded.tokenizer.find(Role.PAD) if begin is None else begin
    return {**({} if first is None else {"decoder_start_token_id": first}), **loaded.decoding.settings()}


def _encoder_tokenizer(texts: Mapping[str, str], config: BERTConfig) -> dict[str, str]:
    """With what `transformers` would not guess: the longest text, and whether the model takes segments."""
    if CONFIG_FILE not in texts:
        return {}
    inputs = ["input_ids", *(["token_type_ids"] if config.n_segments else []), "attention_mask"]
    more = {"model_max_length": config.context_length, "model_input_names": inputs}
    return {CONFIG_FILE: _json({**json.loads(texts[CONFIG_FILE]), **more})}


def _tokenizer_texts(tokenizer: Tokenizer | None) -> dict[str, str]:
    return {} if tokenizer is None else tokenizer_files(tokenizer)


def token_ids(tokenizer: Tokenizer | None) -> dict[str, int]:
    """`bos_token_id` and the like, for the roles that a token plays."""
    if tokenizer is None:
        return {}
    found = {role: tokenizer.find(role) for role in (Role.BEGIN, Role.END, Role.PAD)}
    return {f"{role.value}_id": number for role, number in found.items() if number is not None}


def _as(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def new_folder(target: Path) -> Path:
    if target.exists():
        raise InputError(f"{target}: is there already; name a new folder")
    return target


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
