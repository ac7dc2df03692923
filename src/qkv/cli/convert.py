"""`qkv convert`: a model into another format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.progress import say
from qkv.errors import InputError


class Format(StrEnum):
    """What a model is converted to."""

    HF = "hf"
    GGUF = "gguf"
    INT8 = "int8"
    CT2 = "ct2"


class Numbers(StrEnum):
    """How its numbers are stored."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"


def convert(
    model: Annotated[str, typer.Argument(help="A shipped name, a run or model folder, a .gguf or .bin file.")],
    out: Annotated[Path, typer.Argument(help="A new folder; a new file for gguf.")],
    *,
    to: Annotated[
        Format,
        typer.Option(help="hf: for transformers; gguf: llama.cpp; ct2: CTranslate2; int8: ours, a byte a weight."),
    ],
    numbers: Annotated[
        Numbers | None, typer.Option(help="hf, ct2: f32 (default) or f16; gguf: f16 (default), f32 or q8_0.")
    ] = None,
) -> None:
    """Write a model in another format.

    \b
    Examples:
      qkv convert stories stories-hf --to hf
      qkv convert run stories.gguf --to gguf --numbers q8_0
      qkv convert run small --to int8
      qkv convert es-en es-en-ct2 --to ct2
    """
    if out.exists():
        raise InputError(f"{out}: is there already; name a new one")
    if to is Format.INT8 and numbers is not None:
        raise InputError(f"--to int8 has one kind of numbers; leave out --numbers {numbers}")
    if to in (Format.HF, Format.CT2) and numbers is Numbers.Q8_0:
        raise InputError(f"--to {to} stores f32 or f16, not q8_0")
    from qkv.tasks import load_pretrained
    from qkv.weights import save
    from qkv.weights.ct2 import save_ct2
    from qkv.weights.gguf_file import write_gguf

    loaded = load_pretrained(model)
    for remark in loaded.remarks:
        say(f"{model}: {remark}")
    match to:
        case Format.HF:
            save.save_hf(loaded, out, numbers=save.Numbers(numbers or "f32"))
        case Format.INT8:
            save.save_int8(loaded, out)
        case Format.CT2:
            for remark in save_ct2(loaded, out, numbers=save.Numbers(numbers or "f32")):
                say(f"{out}: {remark}")
        case Format.GGUF:
            write_gguf(loaded, out, numbers=save.Numbers(numbers or "f16"))
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    print(f"{out}: {sum(file.stat().st_size for file in files):,} bytes")
