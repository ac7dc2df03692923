"""Save models in native and Hugging Face formats."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.choices import SpecialToken
from qkv.config import BERTConfig
from qkv.errors import InputError
from qkv.models import Seq2Seq
from qkv.text import Tokenizer, tokenizer_files
from qkv.text.tokenizer_files import CONFIG_FILE
from qkv.weights.checkpoint_folder import (
    INT8_ROWS,
    STORAGE_KEY,
    WEIGHTS_FILE,
    quantize_matrices_to_int8,
    write_folder_atomically_with_manifest,
)
from qkv.weights.families import to_lossless_published_config
from qkv.weights.generation_config import GENERATION_CONFIG_FILE
from qkv.weights.model_loader import (
    SOURCE_TOKENIZER,
    ModelBundle,
    native_name_table,
    to_published_state,
    to_published_weights,
)
from qkv.weights.sentence_transformers import sentence_transformers_files


class StorageDType(StrEnum):
    """The data types in which weights can be stored."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    """GGUF's 8-bit format, in which 32 int8 values share a float16 scale."""

    @property
    def torch_dtype(self) -> torch.dtype:
        if self is StorageDType.Q8_0:
            raise InputError("q8_0 is only supported in GGUF files")
        return torch.float32 if self is StorageDType.F32 else torch.float16


def save_native(bundle: ModelBundle, target: Path) -> None:
    """Save a model to a new native folder without changing its weights. Use `load_model` to load the folder."""
    write_folder_atomically_with_manifest(
        require_nonexistent_folder(target),
        tensors={WEIGHTS_FILE: to_published_state(bundle.model, native_name_table(bundle.model))},
        text_files=_native_config_and_tokenizer_files(bundle),
    )


def save_native_int8(bundle: ModelBundle, target: Path) -> None:
    """Save a model to a new native folder, with its matrices quantized to int8."""
    write_folder_atomically_with_manifest(
        require_nonexistent_folder(target),
        tensors={
            WEIGHTS_FILE: quantize_matrices_to_int8(to_published_state(bundle.model, native_name_table(bundle.model)))
        },
        text_files=_native_config_and_tokenizer_files(bundle),
        metadata={STORAGE_KEY: INT8_ROWS},
    )


def _native_config_and_tokenizer_files(bundle: ModelBundle) -> dict[str, str]:
    files = {"config.json": _format_json(bundle.model.config.model_dump(mode="json", exclude_none=True))}
    if settings := bundle.generation_config.to_hf_dict():
        files[GENERATION_CONFIG_FILE] = _format_json(settings)
    if bundle.source_tokenizer is not None:
        files[SOURCE_TOKENIZER] = bundle.source_tokenizer.backend.to_str()
    return {**files, **_optional_tokenizer_files(bundle.tokenizer)}


def save_hf(bundle: ModelBundle, target: Path, *, dtype: StorageDType = StorageDType.F32) -> None:
    """Save a model to a new folder that `AutoModel` and `AutoTokenizer` of `transformers` can load."""
    tokenizer = _require_joint_vocabulary_tokenizer(bundle)
    ids = {**bos_eos_pad_token_ids(tokenizer), **published_seq2seq_generation_settings(bundle)}
    # The token ids in the config override those of the tokenizer because RoBERTa's positions depend on the padding id.
    settings = {
        **ids,
        **to_lossless_published_config(bundle.model.config),
        "dtype": str(dtype.torch_dtype).removeprefix("torch."),
    }
    files = {"config.json": _format_json(settings), **_optional_tokenizer_files(tokenizer)}
    if isinstance(bundle.model.config, BERTConfig):
        files |= _tokenizer_config_with_length_and_inputs(files, bundle.model.config)
        files |= sentence_transformers_files(bundle.model.config)
    else:
        files[GENERATION_CONFIG_FILE] = _format_json(ids)
    tensors = _cast_tensors(to_published_weights(bundle.model), dtype.torch_dtype)
    write_folder_atomically_with_manifest(
        require_nonexistent_folder(target), tensors={WEIGHTS_FILE: tensors}, text_files=files
    )


def _require_joint_vocabulary_tokenizer(bundle: ModelBundle) -> Tokenizer | None:
    """Return the tokenizer, or raise an error if the source and target tokenizers have different vocabularies.

    The Hugging Face format supports only one vocabulary.
    """
    target, source = bundle.tokenizer, bundle.source_tokenizer
    if target is None or source is None:
        return target
    if source.backend.get_vocab() != target.backend.get_vocab():
        sizes = f"{source.vocab_size} and {target.vocab_size}"
        raise InputError(
            f"--to hf only supports a single tokenizer, but source and target have different vocabularies ({sizes} ids)"
        )
    return source


def published_seq2seq_generation_settings(bundle: ModelBundle) -> dict[str, Any]:
    """Return the generation settings of an encoder–decoder in the published format.

    This includes the start token, which native models do not store because their tokenizer defines it.
    """
    if not isinstance(bundle.model, Seq2Seq) or bundle.tokenizer is None:
        return {}
    bos_id = bundle.tokenizer.find_special_id(SpecialToken.BOS)
    start_id = bundle.tokenizer.find_special_id(SpecialToken.PAD) if bos_id is None else bos_id
    settings = {} if start_id is None else {"decoder_start_token_id": start_id}
    return {**settings, **bundle.generation_config.to_hf_dict()}


def _tokenizer_config_with_length_and_inputs(files: Mapping[str, str], config: BERTConfig) -> dict[str, str]:
    """Return the tokenizer config with the maximum length and input names added.

    Without these settings, `transformers` would use incorrect defaults.
    """
    if CONFIG_FILE not in files:
        return {}
    input_names = ["input_ids", *(["token_type_ids"] if config.n_segments else []), "attention_mask"]
    settings = {"model_max_length": config.context_length, "model_input_names": input_names}
    return {CONFIG_FILE: _format_json({**json.loads(files[CONFIG_FILE]), **settings})}


def _optional_tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, str]:
    return {} if tokenizer is None else tokenizer_files(tokenizer)


def bos_eos_pad_token_ids(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for the special tokens that the tokenizer has."""
    if tokenizer is None:
        return {}
    ids = {role: tokenizer.find_special_id(role) for role in (SpecialToken.BOS, SpecialToken.EOS, SpecialToken.PAD)}
    return {f"{role.value}_id": token_id for role, token_id in ids.items() if token_id is not None}


def _cast_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def require_nonexistent_folder(target: Path) -> Path:
    """Return `target`, or raise an error if it already exists."""
    if target.exists():
        raise InputError(f"{target}: already exists; use a new folder")
    return target


def _format_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
