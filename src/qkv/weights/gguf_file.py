"""GGUF, llama.cpp's file: weights, settings and tokenizer in one."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.config import GPTConfig
from qkv.errors import InputError, MissingExtraError, QKVError, WeightsError
from qkv.weights.gguf_names import ARCHITECTURES, architecture_of
from qkv.weights.gguf_tokenizer import read_tokenizer, write_tokenizer
from qkv.weights.models import Loaded
from qkv.weights.rotary_order import halves_to_pairs, pairs_to_halves
from qkv.weights.save import Numbers
from qkv.weights.sizing import build_to_fill
from qkv.weights.tensors import fill, published

MAGIC = b"GGUF"
TOKENIZER = "tokenizer.ggml."


def read_gguf(file: Path) -> Loaded:
    """Weights in float32, whatever they are stored as."""
    gguf = _package(file)
    try:
        reader = gguf.GGUFReader(file)
        settings = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {each.name: each for each in reader.tensors}
        return _loaded(gguf, settings, tensors)
    except QKVError as error:
        raise type(error)(f"{file}: {error}") from None
    except KeyError as error:
        raise WeightsError(f"{file}: has no setting {error.args[0]}") from None
    except Exception as error:  # noqa: BLE001 - the package trusts a file; a broken one fails anywhere inside it
        raise WeightsError(f"{file}: not a whole GGUF file: {' '.join(str(error).split())[:200]}") from None


def write_gguf(loaded: Loaded, target: Path, *, numbers: Numbers = Numbers.F16) -> None:
    """A file for llama.cpp. Vectors stay float32; so do, as float16, matrices whose rows q8_0 cannot divide by 32."""
    if target.exists():
        raise InputError(f"{target}: is there already; name a new file")
    gguf = _package(target)
    config = loaded.model.config
    name = architecture_of(config)
    assert isinstance(config, GPTConfig)
    known = ARCHITECTURES[name]
    settings = {f"{name}.{key}": value for key, value in known.write(config).items()}
    if loaded.tokenizer is not None:
        own = write_tokenizer(loaded.tokenizer, n_rows=config.vocab_size)
        settings |= {TOKENIZER + key: value for key, value in own.items()}
    tensors = published(loaded.model, known.names(config))
    if known.in_pairs:
        tensors = _reordered(tensors, config, halves_to_pairs)
    aside = target.with_name(f".partial-{target.name}")
    try:
        _write(gguf, aside, name, settings, tensors, numbers)
        aside.replace(target)
    except OSError as error:
        raise WeightsError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        aside.unlink(missing_ok=True)


def _loaded(gguf: ModuleType, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> Loaded:
    name = settings["general.architecture"]
    if name not in ARCHITECTURES:
        raise WeightsError(f"general.architecture={name!r} is unknown; known: {', '.join(ARCHITECTURES)}")
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
    # The rows that are there are the truth; the setting is missing from older files.
    own["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    config = ARCHITECTURES[name].read(own, frozenset(tensors))
    values = {each.name: _values(gguf, each) for each in tensors.values()}
    if ARCHITECTURES[name].in_pairs:
        values = _reordered(values, config, pairs_to_halves)
    model = build_to_fill(config, values)
    fill(model, values, ARCHITECTURES[name].names(config))
    spoken = {key.removeprefix(TOKENIZER): value for key, value in settings.items() if key.startswith(TOKENIZER)}
    return Loaded(model.eval(), read_tokenizer(spoken) if "model" in spoken else None)


def _values(gguf: ModuleType, stored: Any) -> Tensor:  # noqa: ANN401 - the package's own tensor
    try:
        numbers = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        raise WeightsError(f"{stored.name}: stored as {stored.tensor_type.name}, which cannot be read") from None
    return torch.from_numpy(np.array(numbers, dtype=np.float32))


def _reordered(tensors: Mapping[str, Tensor], config: GPTConfig, order: Any) -> dict[str, Tensor]:  # noqa: ANN401
    turned = dict(tensors)
    for name, tensor in tensors.items():
        # Rows that do not make whole heads are misshapen: `fill` says so, with both shapes.
        if name.split(".")[-2] in ("attn_q", "attn_k") and tensor.shape[0] % config.d_head == 0:
            turned[name] = order(tensor, n_heads=tensor.shape[0] // config.d_head)
    return turned


def _write(
    gguf: ModuleType,
    target: Path,
    name: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    numbers: Numbers,
) -> None:
    writer = gguf.GGUFWriter(target, name)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in settings.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for key, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        match Numbers.F32 if tensor.dim() == 1 else numbers:
            case Numbers.F32:
                writer.add_tensor(key, values)
            case Numbers.Q8_0 if values.shape[-1] % 32 == 0:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(key, gguf.quantize(values, kind), raw_dtype=kind)
            case _:
                writer.add_tensor(key, values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _package(file: Path) -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise MissingExtraError(f"{file}: GGUF files need the package gguf; install qkv[formats]") from None
    return gguf
