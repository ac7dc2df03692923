"""`qkv evaluate`: how well a model guesses a text, translates, or classifies."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.cli.device_options import Device, Place
from qkv.cli.model_argument import Model
from qkv.cli.text_tables import table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import LanguageModel, TextEncoder

Truncate = Annotated[
    bool, typer.Option("--truncate", help="With --labelled: cut texts that are too long; else they are refused.")
]
Beam = Annotated[
    int | None, typer.Option(min=1, help="With --pairs: running guesses of the search; 1: greedy; else 5.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N documents of --text (a GPT's) or of --pairs.")]
Int8 = Annotated[bool, typer.Option("--int8", help="MODEL (not --against) computes in 8-bit numbers, on the CPU.")]
PER_CLASS = ("precision", "recall", "f1")


def evaluate(
    model: Model,
    *,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files; documents are parted by a line <|endoftext|>.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option(help="Translation pairs, source⇥target a line.")] = None,
    labelled: Annotated[
        Path | None, typer.Option(help="Labelled texts, a table as `qkv finetune --data` takes it.")
    ] = None,
    truncate: Truncate = False,
    against: Annotated[str | None, typer.Option(metavar="MODEL", help="With --pairs: compare with this one.")] = None,
    beam: Beam = None,
    limit: Limit = None,
    int8: Int8 = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """How well a model guesses texts, translates pairs, or classifies.

    A GPT: loss, perplexity and bits a byte, each document from a fresh context. A BERT: its two games, hidden words
    and next sentences, with the same pairs and hidden words each time. A translator: BLEU and chrF. A fine-tuned
    BERT, by --labelled: accuracy, F1, Matthews, and each class by itself; or what else fits what it was trained for.

    Bits a byte: −log2 p of every token and of the end of each document, over the document's bytes (UTF-8, without
    white space at its ends). A document longer than the context is read in overlapping windows: from the second on
    the first half of a window is only seen, the second half scored.

    \b
    Examples:
      qkv evaluate run --text held-out.txt
      qkv evaluate run --text held-out.txt --limit 100 --json
      qkv evaluate bert --text reviews.txt[-500:]
      qkv evaluate es-en --pairs test.tsv --against es-en-rnn
      qkv evaluate sentiment --labelled dev.tsv
    """
    _check_one({"--text": text, "--pairs": pairs, "--labelled": labelled})
    if truncate and labelled is None:
        raise InputError("--truncate cuts labelled texts: it goes with --labelled")
    place = Place(device=device, int8=int8)
    if pairs is not None:
        from qkv.cli.evaluate_pairs import evaluate_pairs

        evaluate_pairs(model, pairs=pairs, against=against, beam=beam or 5, limit=limit, place=place, as_json=as_json)
        return
    if against is not None:
        raise InputError("--against compares translations: it goes with --pairs")
    if beam is not None:
        raise InputError(f"--beam {beam} is of a search for translations: it goes with --pairs")
    if labelled is not None:
        if limit is not None:
            raise InputError("--limit is for documents and pairs: all labelled texts count")
        _show(_classified(model, labelled, truncate=truncate, place=place), as_json=as_json)
        return
    _show(_evaluated(model, text or [], limit=limit, place=place), as_json=as_json)


def _check_one(given: Mapping[str, object]) -> None:
    names = [name for name, value in given.items() if value is not None]
    if not names:
        raise InputError(
            "judge it by what? --text FILE for a GPT or BERT, --pairs FILE for a translator, --labelled FILE for a "
            "fine-tuned BERT"
        )
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} were given; choose one")


def _evaluated(model: str, text: list[Path], *, limit: int | None, place: Place) -> dict[str, float | int | None]:
    from qkv.tasks import LanguageModel, TextEncoder

    match task := place.load(model):
        case LanguageModel():
            return _guessed(task, text, limit=limit)
        case TextEncoder():
            if limit is not None:
                raise InputError("--limit is for a GPT; of a file, FILE[:100] names the first 100 documents")
            if "fill" not in task.capabilities:
                raise InputError(f"{model}: guesses no hidden words; it can {', '.join(task.capabilities)}")
            return _games(task, text)
        case _:
            raise InputError(f"{model}: translates; judge it by --pairs")


def _classified(model: str, labelled: Path, *, truncate: bool, place: Place) -> dict[str, Any]:
    from qkv.data.labeled_texts import ColumnNames
    from qkv.tasks import TextEncoder
    from qkv.tasks.evaluation import evaluate_classifier

    return evaluate_classifier(place.load_as(TextEncoder, model), labelled, columns=ColumnNames(), truncate=truncate)


def _show(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    classes = result.get("classes", [])
    # Of two classes, F1 is one class's: it is said whose.
    shown = {
        f"f1 of {classes[1]['class']}" if name == "f1" else name: value
        for name, value in result.items()
        if name != "classes"
    }
    width = max(map(len, shown)) + 2
    for name, value in shown.items():
        print(f"{name:{width}}{value:,.4f}" if isinstance(value, float) else f"{name:{width}}{value:,}")
    if classes:
        rows = [[one["class"], f"{one['rows']:,}", *(f"{one[name]:.4f}" for name in PER_CLASS)] for one in classes]
        print("\n".join(["", *table(("class", "rows", *PER_CLASS), rows)]))


def _guessed(task: "LanguageModel", text: list[Path], *, limit: int | None) -> dict[str, float | int | None]:
    from qkv.cli.progress import counted
    from qkv.data import read_documents
    from qkv.training.evaluation import EvaluationResult

    documents = islice(read_documents(text), limit)
    scores = list(counted(task.score_documents(documents), "documents"))
    if not scores:
        raise InputError("the texts hold 0 documents; at least 1 is needed")
    whole = EvaluationResult(
        loss_sum=sum(score.loss_sum for score in scores),
        n_targets=sum(score.n_targets for score in scores),
        n_bytes=sum(score.n_bytes or 0 for score in scores),
    )
    return {
        "documents": len(scores), "tokens": whole.n_targets, "bytes": whole.n_bytes,
        "loss": whole.loss, "perplexity": whole.perplexity, "bits_per_byte": whole.bits_per_byte,
    }  # fmt: skip


def _games(task: "TextEncoder", text: list[Path]) -> dict[str, float | int | None]:
    from qkv.cli.progress import bars
    from qkv.training.bert import evaluate_masked_lm

    with bars() as progress:
        score = evaluate_masked_lm(task.model, task.tokenizer, text, progress=progress)
    return {"hidden_words": score.n_targets, **score.measures}
