"""`qkv evaluate`: how well a model guesses a text."""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from qkv.errors import InputError


def evaluate(
    model: Annotated[str, typer.Argument(help="A shipped name, a run folder, a Hugging Face folder, or a file.")],
    *,
    text: Annotated[list[Path], typer.Option(help="Text files; documents are parted by a line <|endoftext|>.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first so many documents alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits a byte of a text, each document from a fresh context.

    Bits a byte: −log2 p of every token and of the end of each document, over the document's bytes (UTF-8, without
    white space at its ends). A document longer than the context is read in overlapping windows: from the second on
    the first half of a window is only seen, the second half scored.

    \b
    Examples:
      qkv evaluate run --text held-out.txt
      qkv evaluate run --text held-out.txt --limit 100 --json
    """
    from qkv.cli.progress import counted
    from qkv.data import read_documents
    from qkv.tasks import LanguageModel, load_as
    from qkv.training.evaluation import Score

    documents = islice(read_documents(text), limit)
    task = load_as(LanguageModel, model)
    scores = list(counted(task.score_all(documents), "documents"))
    if not scores:
        raise InputError("the texts hold 0 documents; at least 1 is needed")
    whole = Score(
        loss_sum=sum(score.loss_sum for score in scores),
        n_targets=sum(score.n_targets for score in scores),
        n_bytes=sum(score.n_bytes or 0 for score in scores),
    )
    result = {
        "documents": len(scores), "tokens": whole.n_targets, "bytes": whole.n_bytes,
        "loss": whole.loss, "perplexity": whole.perplexity, "bits_per_byte": whole.bits_per_byte,
    }  # fmt: skip
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:14} {value:,.4f}" if isinstance(value, float) else f"{name:14} {value:,}")
