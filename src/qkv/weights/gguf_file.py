"""Read and write llama.cpp's GGUF files, which contain the weights, settings and tokenizer of a model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.config import GPTConfig
from qkv.errors import InputError, MissingExtraError, QKVError, WeightsError
from qkv.weights.gguf_architectures import GGUF_ARCHITECTURES, find_lossless_gguf_architecture
from qkv.weights.gguf_tokenizer import gguf_tokenizer_settings, read_gguf_tokenizer
from qkv.weights.model_loader import ModelBundle, build_unless_config_exceeds_tensors, load_into, to_published_state
from qkv.weights.rotary_layout import halves_to_interleaved, interleaved_to_halves
from qkv.weights.save import StorageDType

GGUF_MAGIC = b"GGUF"
TOKENIZER_PREFIX = "tokenizer.ggml."


def read_gguf(file: Path) -> ModelBundle:
    """Load a model from a GGUF file and convert its weights to float32."""
    gguf = _import_gguf(file)
    try:
        reader = gguf.GGUFReader(file)
        settings = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        return _build_model_bundle(gguf, settings, tensors)
    except QKVError as error:
        raise type(error)(f"{file}: {error}") from None
    except KeyError as error:
        raise WeightsError(f"{file}: the setting {error.args[0]} is missing") from None
    except Exception as error:  # noqa: BLE001 - the package does not validate files and can fail anywhere
        raise WeightsError(f"{file}: not a complete GGUF file: {' '.join(str(error).split())[:200]}") from None


def write_gguf(bundle: ModelBundle, target: Path, *, dtype: StorageDType = StorageDType.F16) -> None:
    """Save a model to a new GGUF file.

    Vectors are stored as float32. With q8_0, matrices whose row length is not a multiple of 32 are stored as float16.
    """
    if target.exists():
        raise InputError(f"{target}: already exists; use a new file")
    gguf = _import_gguf(target)
    config = bundle.model.config
    name = find_lossless_gguf_architecture(config)
    assert isinstance(config, GPTConfig)
    architecture = GGUF_ARCHITECTURES[name]
    settings = {f"{name}.{key}": value for key, value in architecture.write_config(config).items()}
    if bundle.tokenizer is not None:
        tokenizer_settings = gguf_tokenizer_settings(bundle.tokenizer, vocab_size=config.vocab_size)
        settings |= {TOKENIZER_PREFIX + key: value for key, value in tokenizer_settings.items()}
    tensors = to_published_state(bundle.model, architecture.name_table(config))
    if architecture.has_interleaved_rotary:
        tensors = _permute_query_key_rows(tensors, config, halves_to_interleaved)
    temporary = target.with_name(f".partial-{target.name}")
    try:
        _write_gguf_file(gguf, temporary, name, settings, tensors, dtype)
        temporary.replace(target)
    except OSError as error:
        raise WeightsError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _build_model_bundle(gguf: ModuleType, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelBundle:
    name = settings["general.architecture"]
    if name not in GGUF_ARCHITECTURES:
        raise WeightsError(
            f"general.architecture={name!r} is not supported; supported values: {', '.join(GGUF_ARCHITECTURES)}"
        )
    architecture = GGUF_ARCHITECTURES[name]
    model_settings = {
        key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")
    }
    # Use the number of rows in the embedding matrix because older files do not contain this setting.
    model_settings["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    config = architecture.read_config(model_settings, frozenset(tensors))
    values = {tensor.name: _dequantize(gguf, tensor) for tensor in tensors.values()}
    if architecture.has_interleaved_rotary:
        values = _permute_query_key_rows(values, config, interleaved_to_halves)
    model = build_unless_config_exceeds_tensors(config, values)
    load_into(model, values, architecture.name_table(config))
    tokenizer_settings = {
        key.removeprefix(TOKENIZER_PREFIX): value for key, value in settings.items() if key.startswith(TOKENIZER_PREFIX)
    }
    return ModelBundle(model.eval(), read_gguf_tokenizer(tokenizer_settings) if "model" in tokenizer_settings else None)


def _dequantize(gguf: ModuleType, stored: Any) -> Tensor:  # noqa: ANN401 - tensor class of the gguf package
    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        raise WeightsError(f"{stored.name}: the tensor type {stored.tensor_type.name} is not supported") from None
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _permute_query_key_rows(
    tensors: Mapping[str, Tensor], config: GPTConfig, permute: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Apply `permute` to the rows of all query and key projections."""
    permuted = dict(tensors)
    for name, tensor in tensors.items():
        # Skip tensors whose rows do not divide evenly into heads. `load_into` reports their shapes.
        if name.split(".")[-2] in ("attn_q", "attn_k") and tensor.shape[0] % config.d_head == 0:
            permuted[name] = permute(tensor, n_heads=tensor.shape[0] // config.d_head)
    return permuted


def _write_gguf_file(
    gguf: ModuleType,
    target: Path,
    name: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: StorageDType,
) -> None:
    writer = gguf.GGUFWriter(target, name)
    value_types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in settings.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[value_types[type(value)]])
    for key, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        match StorageDType.F32 if tensor.dim() == 1 else dtype:
            case StorageDType.F32:
                writer.add_tensor(key, values)
            case StorageDType.Q8_0 if values.shape[-1] % 32 == 0:
                quantization = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(key, gguf.quantize(values, quantization), raw_dtype=quantization)
            case _:
                writer.add_tensor(key, values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _import_gguf(file: Path) -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise MissingExtraError(
            f"{file}: GGUF files require the gguf package; install it with: pip install 'qkv[formats]'"
        ) from None
    return gguf
