"""Read and write the files of checkpoint folders.

Folders are written atomically: the files are written to a temporary folder, hashed in a manifest and synced to disk,
and then the folder is renamed to its final name. The manifest detects any later change.

Weights can be stored as int8 with one scale per row. A matrix is then stored as `NAME` (int8, from −127 to 127) and
`NAME.scale` (float32, one scale per row). Multiplying each row by its scale recovers the weights. Vectors are stored
unchanged. The metadata of the safetensors file contains `qkv_storage` = `int8-rows`.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv.data.file_io import convert_os_errors_to_disk_error, fsync_path
from qkv.errors import WeightsError
from qkv.text.tokenizer import parse_encodable_json

WEIGHTS_FILE = "model.safetensors"
SHARD_INDEX_FILE = "model.safetensors.index.json"
MANIFEST = "manifest.json"
PYTORCH_METADATA = MappingProxyType({"format": "pt"})
"""The default metadata for the headers of safetensors files.

Some readers reject files whose metadata does not name the framework that wrote the tensors.
"""
DISK_BLOCK = 4096
PARTIAL_PREFIX = ".partial-"
"""The name prefix of temporary folders. It is safe to delete folders left behind by an interrupted write."""
STORAGE_KEY = "qkv_storage"
INT8_ROWS = "int8-rows"
SCALE_SUFFIX = ".scale"
INT8_MAX = 127


def write_folder_atomically_with_manifest(
    target: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    text_files: Mapping[str, str],
    metadata: Mapping[str, str] = PYTORCH_METADATA,
    write_extra_files: Callable[[Path], None] = lambda _folder: None,
) -> None:
    """Write safetensors files, text files and a manifest of their hashes to a new folder.

    `tensors` and `text_files` map file names to contents. The name of a text file may include one parent folder
    (`1_Pooling/config.json`). `metadata` is stored in the header of every safetensors file and should have only one
    entry because the order of multiple entries is not deterministic. `write_extra_files` is called with the path of the
    temporary folder and may write additional files.
    """
    sizes = [sum(t.numel() * t.element_size() for t in file.values()) for file in tensors.values()]
    sizes += [len(text.encode()) for text in text_files.values()]
    # Files occupy whole disk blocks. Allow one extra block per file for its header or manifest entry.
    n_bytes = sum((size // DISK_BLOCK + 2) * DISK_BLOCK for size in sizes)
    with create_folder_atomically(target, n_bytes) as temporary:
        for parent in {(temporary / name).parent for name in text_files} - {temporary}:
            parent.mkdir()
        for name, file in tensors.items():
            _save_safetensors_raising_os_error(temporary / name, file, metadata)
        for name, text in text_files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_extra_files(temporary)
        _write_manifest_chmod_and_fsync(temporary)


@contextmanager
def create_folder_atomically(target: Path, required_free_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder, then rename it to `target`. If an `OSError` occurs, delete the temporary folder."""
    temporary = target.parent / f"{PARTIAL_PREFIX}{target.name}-{os.getpid()}"
    with convert_os_errors_to_disk_error(target, required_free_bytes):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(target.parent).free < required_free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            temporary.rename(target)
            fsync_path(target.parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_folder_matches_manifest(folder: Path) -> None:
    """Check that a folder contains exactly the files listed in its manifest and that none of them has changed."""
    manifest = _read_and_verify_manifest(folder)
    existing = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - {MANIFEST}
    parents = {str(Path(name).parent) for name in manifest}
    for name in sorted(existing - set(manifest) - parents):
        raise WeightsError(f"{folder / name}: the file is not in the manifest, which lists {len(manifest)} files")
    for name, expected in manifest.items():
        path = folder / name
        if name not in existing:
            raise WeightsError(f"{path}: the file is listed in the manifest but missing")
        try:
            n_bytes, file_hash = path.stat().st_size, hash_file(path)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
        if n_bytes != expected["bytes"]:
            raise WeightsError(
                f"{path}: expected {expected['bytes']} bytes according to the manifest, got {n_bytes} bytes"
            )
        if file_hash != expected["blake2b"]:
            raise WeightsError(f"{path}: hash mismatch; the file was modified after it was written")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file, which must contain an object."""
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise WeightsError(f"{path}: expected a JSON object, got {type(settings).__name__}")
    return settings


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value, checked by the callers
    """Read a JSON file, and raise a `WeightsError` if the file cannot be read or is not valid JSON."""
    try:
        return parse_encodable_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: invalid JSON: {error}") from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors from a safetensors file."""
    try:
        return load_file(path)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from None


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """Read the metadata from the header of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from None


def hash_file(path: Path) -> str:
    """Return the 128-bit BLAKE2b hash of a file as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _save_safetensors_raising_os_error(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata=dict(metadata))
    except SafetensorError as error:
        # safetensors reports the error number only in the message, for example "… (os error 28)".
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else error from None


def _write_manifest_chmod_and_fsync(folder: Path) -> None:
    """Write the manifest, set the permissions of all files and sync them to disk."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": hash_file(path)}
        for path in files
    }
    body = json.dumps(entries, indent=1)
    body_hash = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"files": entries, "blake2b": body_hash}, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST]:
        path.chmod(0o644)  # safetensors writes files with mode 0600
        fsync_path(path)
    for parent in {path.parent for path in files} | {folder}:
        fsync_path(parent)


def _read_and_verify_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        entries, body_hash = manifest["files"], manifest["blake2b"]
        for entry in entries.values():
            _ = entry["bytes"], entry["blake2b"]
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{path}: not a valid manifest") from None
    if hashlib.blake2b(json.dumps(entries, indent=1).encode(), digest_size=16).hexdigest() != body_hash:
        raise WeightsError(f"{path}: hash mismatch; the file was modified after it was written")
    # Also detect changes that do not affect the parsed content, such as whitespace.
    if json.dumps({"files": entries, "blake2b": body_hash}, indent=1).encode() != path.read_bytes():
        raise WeightsError(f"{path}: formatting mismatch; the file was modified after it was written")
    return entries


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights in a folder from a single file or from shards, and dequantize them if necessary."""
    if (folder / WEIGHTS_FILE).is_file():
        return _read_safetensors_dequantized(folder / WEIGHTS_FILE)
    if (folder / SHARD_INDEX_FILE).is_file():
        return _read_sharded_safetensors(folder)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise_pickle_error(folder / pickled[0])
    raise WeightsError(f"{folder}: contains neither {WEIGHTS_FILE} nor {SHARD_INDEX_FILE}")


def raise_pickle_error(file: Path) -> NoReturn:
    """Raise an error for a pickled file because loading it could execute arbitrary code."""
    raise WeightsError(
        f"{file}: pickled weights are not supported because loading them can execute arbitrary code; "
        "save the model with `save_pretrained(folder, safe_serialization=True)`"
    )


def _read_safetensors_dequantized(path: Path) -> dict[str, Tensor]:
    storage = read_safetensors_metadata(path).get(STORAGE_KEY)
    tensors = read_safetensors(path)
    if storage is None:
        return tensors
    if storage != INT8_ROWS:
        raise WeightsError(f"{path}: {STORAGE_KEY} must be {INT8_ROWS!r}, got {storage!r}")
    try:
        return dequantize_int8_matrices(tensors)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _read_sharded_safetensors(folder: Path) -> dict[str, Tensor]:
    index_file = folder / SHARD_INDEX_FILE
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(part, str) for pair in weight_map.items() for part in pair
    ):
        raise WeightsError(f"{index_file}: weight_map must be an object that maps tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise WeightsError(f"{index_file}: '{shard}' is outside the folder")
        tensors |= read_safetensors(folder / shard)
    if tensors.keys() != weight_map.keys():
        different = sorted(tensors.keys() ^ weight_map.keys())
        raise WeightsError(
            f"{index_file}: lists {len(weight_map)} tensors, but the shards contain {len(tensors)}; "
            f"the first difference is {different[0]}"
        )
    return tensors


def quantize_matrices_to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize each matrix to int8 values and row scales. The error of each weight is at most half its row's scale."""
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{name}: contains non-finite weights, which cannot be stored as int8")
        if tensor.dim() < 2:
            quantized[name] = tensor.detach().float()
        else:
            quantized[name], quantized[name + SCALE_SUFFIX] = quantize_rows(tensor.detach().float())
    return quantized


def dequantize_int8_matrices(quantized: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert quantized tensors to float32. Quantizing them again yields exactly the same int8 values and scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in quantized.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in quantized:
            continue
        if tensor.dtype is not torch.int8:
            tensors[name] = tensor
            continue
        scale = quantized.get(name + SCALE_SUFFIX)
        if scale is None or scale.shape != tensor.shape[:1]:
            problem = "is missing" if scale is None else f"has shape {tuple(scale.shape)}"
            raise WeightsError(
                f"{name}: the int8 matrix has {tensor.shape[0]} rows, but {name}{SCALE_SUFFIX} {problem}"
            )
        tensors[name] = tensor.float() * _broadcast_rows(scale.float(), tensor)
    return tensors


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 values of a matrix and the scale of each row."""
    scale = _round_up_to_16_significant_bits(matrix.flatten(1).abs().amax(1) / INT8_MAX)
    divisor = torch.where(scale > 0, scale, 1.0)  # avoids dividing rows of zeros by 0
    values = (matrix / _broadcast_rows(divisor, matrix)).round().clamp(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8), scale


def _round_up_to_16_significant_bits(scale: Tensor) -> Tensor:
    """Round each scale up to the next float32 whose last 8 bits are 0.

    The product of an int8 value and such a scale is exact and is therefore the same on every machine.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0xFF) & ~0xFF).view(torch.float32)


def _broadcast_rows(scale: Tensor, matrix: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (matrix.dim() - 1))
