"""`qkv similar`: which lines mean nearly the same?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.device_options import Device, Place
from qkv.cli.model_argument import Model
from qkv.errors import InputError


def similar(
    model: Model,
    queries: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    among: Annotated[Path, typer.Option(metavar="FILE", help="Its lines are compared; .gz and .xz too.")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="So many lines for each query.")] = 5,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long; else they are refused.")
    ] = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a query.")] = False,
) -> None:
    """The lines of a file that are nearest to each query: query, cosine, line number, line; best first.

    Blank lines of the file are passed over; a blank query finds nothing, and gives a blank line. What is near depends
    on what the model learnt: one that only guesses words, as the shipped bert, finds like words and forms; one from
    sentence-transformers finds like meanings.

    \b
    Examples:
      qkv similar bert "someone is eating" --among sentences.txt
      qkv similar all-MiniLM-L6-v2 --among answers.txt -n 1 --json < questions.txt
    """
    import torch

    from qkv.cli.progress import say
    from qkv.cli.text_inputs import answered, encoded, given_texts, in_a_line
    from qkv.tasks import TextEncoder
    from qkv.tasks.text_encoder import nearest

    lines = _lines(among)
    task = Place(device=device).load_as(TextEncoder, model)
    if task.model.config.sentence_embedding is None:
        say(f"{model}: was not trained to compare texts: what is near is like in words rather than in meaning")
    limit = task.embedding.max_tokens
    texts = (text for _, text in lines)
    parts = [task.embed(read, normalize=True) for read in encoded(task, texts, truncate=truncate, max_tokens=limit)]
    vectors = torch.cat(parts)
    read = encoded(task, given_texts(queries), truncate=truncate, max_tokens=limit)
    for query, found in answered(read, lambda some: nearest(task.embed(some, normalize=True), vectors, n=n)):
        rows = [(each.cosine, *lines[each.index]) for each in found or ()]
        if as_json:
            keys = ("cosine", "line", "text")
            said = {"query": query.texts[0], "found": [dict(zip(keys, row, strict=True)) for row in rows]}
            print(json.dumps(said, ensure_ascii=False))
        else:
            asked = in_a_line(query.texts[0])
            print("\n".join(f"{asked}\t{cosine:.4f}\t{number}\t{text}" for cosine, number, text in rows))


def _lines(file: Path) -> list[tuple[int, str]]:
    from qkv.cli.text_inputs import read_lines_of

    if file.is_dir():
        raise InputError(f"--among {file}: is a folder, not a file")
    if not file.is_file():
        raise InputError(f"--among {file}: there is no such file")
    lines = [(number, text) for number, text in enumerate(read_lines_of(str(file)), start=1) if text.strip()]
    if not lines:
        raise InputError(f"--among {file}: holds blank lines alone")
    return lines
