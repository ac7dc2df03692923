"""`qkv embed`: texts become vectors."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import Pooling
from qkv.errors import DiskError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def embed(
    model: Annotated[str, typer.Argument(help="A shipped name, a run folder, a Hugging Face folder, or a file.")],
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    out: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Save them here; else they are printed.")] = None,
    pooling: Annotated[
        Pooling | None, typer.Option(help="mean: of all states; cls: the first. Else as trained, or mean.")
    ] = None,
    normalise: Annotated[
        bool | None, typer.Option("--normalise/--no-normalise", help="To length 1; else as trained, or yes.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a text.")] = False,
) -> None:
    """One vector a text, in order: a .npy table of float32, or a line of numbers each.

    A model from sentence-transformers pools, normalises and limits texts as its folder says, unless options do.

    \b
    Examples:
      qkv embed my-model "A cat sleeps." "A dog runs."
      qkv embed my-model --out vectors.npy --truncate < sentences.txt
    """
    from qkv.cli.progress import say
    from qkv.cli.texts import encoded, given_texts, load_encoder

    if out is not None:
        _check(out, as_json=as_json)
    task = load_encoder(model)
    tables = []
    for read in encoded(task, given_texts(texts), truncate=truncate, max_tokens=task.embedding.max_tokens):
        vectors = task.embed(read, pooling=pooling, normalise=normalise).float().cpu()
        if out is not None:
            tables.append(vectors.numpy())
            continue
        for one, vector in zip(read, vectors.tolist(), strict=True):
            said = json.dumps({"text": one.row[0], "vector": vector}, ensure_ascii=False)
            print(said if as_json else " ".join(f"{number:.6g}" for number in vector))
    if out is not None:
        n, width = _save(tables, out)
        say(f"{n:,} vectors of width {width:,} in {out}")


def _check(out: Path, *, as_json: bool) -> None:
    """Before the model computes, not after."""
    if as_json:
        raise InputError("--out saves a table, --json prints: choose one")
    if out.suffix != ".npy":
        raise InputError(f"--out {out}: the name must end in .npy")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


def _save(tables: "list[NDArray]", out: Path) -> tuple[int, int]:
    import numpy as np

    table = np.concatenate(tables)
    try:
        np.save(out, table)
    except OSError as error:
        raise DiskError(f"--out {out}: {table.nbytes:,} bytes cannot be written: {error.strerror}") from None
    return table.shape
