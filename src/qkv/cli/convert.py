"""The `qkv convert` command."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.output import print_status
from qkv.errors import InputError


class ExportFormat(StrEnum):
    """The formats to which a model can be converted."""

    HF = "hf"
    GGUF = "gguf"
    INT8 = "int8"
    CT2 = "ct2"


class ExportDType(StrEnum):
    """The data types in which weights can be stored."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"


def convert(
    model: Annotated[
        str,
        typer.Argument(help="Name of a shipped model, or path to a run folder, model folder, .gguf file or .bin file."),
    ],
    out: Annotated[Path, typer.Argument(help="Output folder, or output file with --to gguf. Must not exist.")],
    *,
    to: Annotated[
        ExportFormat,
        typer.Option(
            help="Output format: hf (Hugging Face transformers), gguf (llama.cpp), ct2 (CTranslate2) or int8 (qkv's "
            "own format with int8 weights)."
        ),
    ],
    dtype: Annotated[
        ExportDType | None,
        typer.Option(
            help="Data type of the saved weights. The formats hf and ct2 support f32 (default) and f16. The format "
            "gguf supports f16 (default), f32 and q8_0."
        ),
    ] = None,
) -> None:
    """Convert a model to another format.

    \b
    Examples:
      qkv convert stories stories-hf --to hf
      qkv convert run stories.gguf --to gguf --dtype q8_0
      qkv convert run small --to int8
      qkv convert es-en es-en-ct2 --to ct2
    """
    if out.exists():
        raise InputError(f"{out}: the path already exists; choose a new path")
    if to is ExportFormat.INT8 and dtype is not None:
        raise InputError(f"--dtype {dtype} cannot be combined with --to int8")
    if to in (ExportFormat.HF, ExportFormat.CT2) and dtype is ExportDType.Q8_0:
        raise InputError(f"--dtype q8_0 is not supported by --to {to}; use f32 or f16")
    from qkv.tasks import load_pretrained
    from qkv.weights import save
    from qkv.weights.ctranslate2_export import save_ct2
    from qkv.weights.gguf_file import write_gguf

    loaded = load_pretrained(model)
    for remark in loaded.remarks:
        print_status(f"{model}: {remark}")
    match to:
        case ExportFormat.HF:
            save.save_hf(loaded, out, dtype=save.StorageDType(dtype or "f32"))
        case ExportFormat.INT8:
            save.save_native_int8(loaded, out)
        case ExportFormat.CT2:
            for remark in save_ct2(loaded, out, dtype=save.StorageDType(dtype or "f32")):
                print_status(f"{out}: {remark}")
        case ExportFormat.GGUF:
            write_gguf(loaded, out, dtype=save.StorageDType(dtype or "f16"))
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    print(f"{out}: {sum(file.stat().st_size for file in files):,} bytes")
