"""The `qkv embed` command."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import BackendName, InferenceDType, Pooling
from qkv.cli.options import (
    BackendOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    ModelArgument,
    iter_input_texts,
    map_tokenized_texts,
    tokenize_in_batches_and_report_truncation,
)
from qkv.cli.output import print_status
from qkv.errors import DiskError, InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def embed(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to embed. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Save the vectors to this file instead of printing them.")
    ] = None,
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            help="Pooling of the last hidden states: mean (average over all tokens) or cls (the first token). By "
            "default, the model's setting, or mean if there is none."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Normalize the vectors to length 1. By default, the model's setting, or --normalize if there is none.",
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate texts that exceed the context length instead of failing.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = InferenceDType.FLOAT32,
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per text.")] = False,
) -> None:
    """Compute an embedding vector for each text.

    Prints one line of numbers per text or, with --out, saves a float32 array with one row per text. Models from
    sentence-transformers use the pooling, normalization and maximum length specified in their folder unless they are
    overridden by options. A blank text has no vector. It is printed as a blank line (or as null with --json) or, with
    --out, saved as a row of NaN.

    \b
    Examples:
      qkv embed bert "A cat sleeps." "A dog runs."
      qkv embed bert --out vectors.npy --truncate < sentences.txt
    """
    from qkv.tasks import TextEncoder

    if out is not None:
        _check_npy_output(out, as_json=as_json)
    task = DeviceOptions(device=device, dtype=dtype, backend=backend).load_task_as_and_print_remarks(TextEncoder, model)
    batches = tokenize_in_batches_and_report_truncation(
        task, iter_input_texts(texts), truncate=truncate, max_tokens=task.embedding.max_tokens
    )
    results = map_tokenized_texts(
        batches, lambda batch: list(task.embed(batch, pooling=pooling, normalize=normalize).float().cpu().numpy())
    )
    if out is not None:
        _save_npy_with_nan_rows([vector for _, vector in results], out, width=task.model.config.d_model)
        return
    for tokenized, vector in results:
        if as_json:
            numbers = None if vector is None else vector.tolist()
            print(json.dumps({"text": tokenized.texts[0], "vector": numbers}, ensure_ascii=False))
        else:
            print("" if vector is None else " ".join(f"{number:.6g}" for number in vector))


def _check_npy_output(out: Path, *, as_json: bool) -> None:
    """Check that the `--out` path is valid before the model is loaded."""
    if as_json:
        raise InputError("--out and --json cannot be combined")
    if out.suffix != ".npy":
        raise InputError(f"--out {out}: file name must end in .npy")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: folder not found: {out.parent}")


def _save_npy_with_nan_rows(vectors: "list[NDArray | None]", out: Path, *, width: int) -> None:
    import numpy as np

    array = np.full((len(vectors), width), np.nan, dtype=np.float32)
    for row, vector in enumerate(vectors):
        if vector is not None:
            array[row] = vector
    try:
        np.save(out, array)
    except OSError as error:
        raise DiskError(f"--out {out}: cannot write {array.nbytes:,} bytes: {error.strerror}") from None
    n_blank = sum(vector is None for vector in vectors)
    blank_note = f" ({n_blank:,} blank lines are NaN)" if n_blank else ""
    print_status(f"saved {len(vectors):,} vectors of width {width:,} to {out}{blank_note}")
