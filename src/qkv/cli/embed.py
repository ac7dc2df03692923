"""`qkv embed`: texts become vectors."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import DType, Pooling
from qkv.cli.device_options import Device, Dtype, Place
from qkv.cli.model_argument import Model
from qkv.errors import DiskError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def embed(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    out: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Save them here; else they are printed.")] = None,
    pooling: Annotated[
        Pooling | None, typer.Option(help="mean: of all states; cls: the first. Else as trained, or mean.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="To length 1; else as trained, or yes.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long; else they are refused.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = DType.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a text.")] = False,
) -> None:
    """Turn each text into a vector: a line of numbers each, or with --out a .npy table of float32, in order.

    A model from sentence-transformers pools, normalises and limits texts as its folder says, unless options do.
    A blank line has no vector: a blank line, null in JSON, NaN in a table.

    \b
    Examples:
      qkv embed bert "A cat sleeps." "A dog runs."
      qkv embed bert --out vectors.npy --truncate < sentences.txt
    """
    from qkv.cli.text_inputs import answered, encoded, given_texts
    from qkv.tasks import TextEncoder

    if out is not None:
        _check(out, as_json=as_json)
    task = Place(device=device, dtype=dtype).load_as(TextEncoder, model)
    read = encoded(task, given_texts(texts), truncate=truncate, max_tokens=task.embedding.max_tokens)
    found = answered(
        read, lambda some: list(task.embed(some, pooling=pooling, normalize=normalize).float().cpu().numpy())
    )
    if out is not None:
        _save([vector for _, vector in found], out, width=task.model.config.d_model)
        return
    for one, vector in found:
        if as_json:
            numbers = None if vector is None else vector.tolist()
            print(json.dumps({"text": one.texts[0], "vector": numbers}, ensure_ascii=False))
        else:
            print("" if vector is None else " ".join(f"{number:.6g}" for number in vector))


def _check(out: Path, *, as_json: bool) -> None:
    """Before the model computes, not after."""
    if as_json:
        raise InputError("--out saves a table, --json prints: choose one")
    if out.suffix != ".npy":
        raise InputError(f"--out {out}: the name must end in .npy")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


def _save(rows: "list[NDArray | None]", out: Path, *, width: int) -> None:
    import numpy as np

    from qkv.cli.progress import say

    table = np.full((len(rows), width), np.nan, dtype=np.float32)
    for place, row in enumerate(rows):
        if row is not None:
            table[place] = row
    try:
        np.save(out, table)
    except OSError as error:
        raise DiskError(f"--out {out}: {table.nbytes:,} bytes cannot be written: {error.strerror}") from None
    n_blank = sum(row is None for row in rows)
    blank = f"; {n_blank:,} of blank lines are NaN" if n_blank else ""
    say(f"{len(rows):,} vectors of width {width:,} in {out}{blank}")
