"""`qkv evaluate`: how well a model guesses a text, or translates."""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from qkv.errors import InputError


def evaluate(
    model: Annotated[str, typer.Argument(help="A shipped name, a run folder, a Hugging Face folder, or a file.")],
    *,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files; documents are parted by a line <|endoftext|>.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option(help="Translation pairs, source⇥target a line.")] = None,
    against: Annotated[str | None, typer.Option(metavar="MODEL", help="With --pairs: compare with this one.")] = None,
    beam: Annotated[int, typer.Option(min=1, help="With --pairs: running guesses of the search; 1: greedy.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many documents or pairs alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits a byte of a text, each document from a fresh context; BLEU and chrF of pairs.

    Bits a byte: −log2 p of every token and of the end of each document, over the document's bytes (UTF-8, without
    white space at its ends). A document longer than the context is read in overlapping windows: from the second on
    the first half of a window is only seen, the second half scored.

    \b
    Examples:
      qkv evaluate run --text held-out.txt
      qkv evaluate run --text held-out.txt --limit 100 --json
      qkv evaluate es-en --pairs test.tsv --against es-en-rnn
    """
    if (text is None) == (pairs is None):
        raise InputError(f"{'neither' if text is None else 'both'} of --text and --pairs; one is needed")
    if pairs is not None:
        from qkv.cli.evaluate_pairs import evaluate_pairs

        evaluate_pairs(model, pairs=pairs, against=against, beam=beam, limit=limit, as_json=as_json)
        return
    if against is not None:
        raise InputError("--against compares translations: it goes with --pairs")
    _evaluate_text(model, text or [], limit=limit, as_json=as_json)


def _evaluate_text(model: str, text: list[Path], *, limit: int | None, as_json: bool) -> None:
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
