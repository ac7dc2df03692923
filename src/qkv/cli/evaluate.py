"""`qkv evaluate`: how well a model guesses a text."""

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, or a Hugging Face folder.")],
    *,
    text: Annotated[list[Path], typer.Option(help="Text files; documents are parted by a line <|endoftext|>.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first so many documents alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits a byte of a text, each document from a fresh context.

    Bits a byte: −log2 p of every token and of the end of each document, over the document's bytes.

    \b
    Examples:
      qkv evaluate run --text held-out.txt
      qkv evaluate run --text held-out.txt --limit 100 --json
    """
    from qkv.cli.progress import counted
    from qkv.data import read_documents
    from qkv.tasks import load
    from qkv.training.evaluation import Score

    task = load(model)
    total, n_targets, n_bytes, n_documents = 0.0, 0, 0, 0
    for document in counted(read_documents(text), "documents"):
        if limit is not None and n_documents >= limit:
            break
        score = task.score(document)
        total, n_targets = total + score.loss_sum, n_targets + score.n_targets
        n_bytes, n_documents = n_bytes + (score.n_bytes or 0), n_documents + 1
    whole = Score(loss_sum=total, n_targets=n_targets, n_bytes=n_bytes)
    result = {
        "documents": n_documents, "tokens": n_targets, "bytes": n_bytes,
        "loss": whole.loss, "perplexity": whole.perplexity, "bits_per_byte": whole.bits_per_byte,
    }  # fmt: skip
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:14} {value:,.4f}" if isinstance(value, float) else f"{name:14} {value:,}")
