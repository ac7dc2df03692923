"""The `qkv similar` command."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.choices import BackendName
from qkv.cli.options import (
    BackendOption,
    DeviceOption,
    DeviceOptions,
    ModelArgument,
    escape_newlines,
    iter_file_or_stdin_lines,
    iter_input_texts,
    map_tokenized_texts,
    tokenize_in_batches_and_report_truncation,
)
from qkv.cli.output import print_status
from qkv.errors import InputError


def similar(
    model: ModelArgument,
    queries: Annotated[
        list[str] | None,
        typer.Argument(help="Query texts. By default, queries are read from standard input, one per line."),
    ] = None,
    *,
    among: Annotated[
        Path, typer.Option(metavar="FILE", help="File with the lines to search. Can be compressed (.gz or .xz).")
    ],
    top_k: Annotated[int, typer.Option("--top-k", "-n", min=1, help="Number of lines to print per query.")] = 5,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate texts that exceed the context length instead of failing.")
    ] = False,
    device: DeviceOption = "auto",
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per query.")] = False,
) -> None:
    """Find the lines of a file that are most similar to each query.

    For each match, prints the query, cosine similarity, line number and line, best match first. Blank lines of the file
    are ignored. For a blank query, prints a blank line. The results depend on how the model was trained: models trained
    only on masked words (such as the shipped bert) find lines with similar wording, and models from
    sentence-transformers find lines with similar meaning.

    \b
    Examples:
      qkv similar bert "someone is eating" --among sentences.txt
      qkv similar all-MiniLM-L6-v2 --among answers.txt -n 1 --json < questions.txt
    """
    import torch

    from qkv.tasks import TextEncoder
    from qkv.tasks.similarity import find_nearest_by_dot_product

    lines = _read_nonblank_lines(among)
    task = DeviceOptions(device=device, backend=backend).load_task_as_and_print_remarks(TextEncoder, model)
    if task.model.config.sentence_embedding is None:
        print_status(
            f"{model}: the model was not trained to compare texts, so it finds similar wording rather than similar "
            "meaning"
        )
    max_tokens = task.embedding.max_tokens
    line_batches = tokenize_in_batches_and_report_truncation(
        task, (text for _, text in lines), truncate=truncate, max_tokens=max_tokens
    )
    vectors = torch.cat([task.embed(batch, normalize=True) for batch in line_batches])
    query_batches = tokenize_in_batches_and_report_truncation(
        task, iter_input_texts(queries), truncate=truncate, max_tokens=max_tokens
    )
    for query, neighbors in map_tokenized_texts(
        query_batches, lambda batch: find_nearest_by_dot_product(task.embed(batch, normalize=True), vectors, n=top_k)
    ):
        rows = [(neighbor.cosine, *lines[neighbor.index]) for neighbor in neighbors or ()]
        if as_json:
            keys = ("cosine", "line", "text")
            matches = [dict(zip(keys, row, strict=True)) for row in rows]
            print(json.dumps({"query": query.texts[0], "matches": matches}, ensure_ascii=False))
        else:
            query_text = escape_newlines(query.texts[0])
            print("\n".join(f"{query_text}\t{cosine:.4f}\t{number}\t{text}" for cosine, number, text in rows))


def _read_nonblank_lines(file: Path) -> list[tuple[int, str]]:
    """Read the nonblank lines of a file with their line numbers."""
    if file.is_dir():
        raise InputError(f"--among {file}: must be a file, got a folder")
    if not file.is_file():
        raise InputError(f"--among {file}: file not found")
    lines = [(number, text) for number, text in enumerate(iter_file_or_stdin_lines(str(file)), start=1) if text.strip()]
    if not lines:
        raise InputError(f"--among {file}: the file contains only blank lines")
    return lines
