"""The `qkv classify` command."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import BackendName, InferenceDType
from qkv.cli.options import (
    BackendOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    ModelArgument,
    escape_newlines,
    iter_input_texts,
    map_tokenized_texts,
    split_tab_separated_pairs,
    tokenize_in_batches_and_report_truncation,
)

if TYPE_CHECKING:
    from qkv.tasks import Classification


def classify(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to classify. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    next_sentence: Annotated[
        bool,
        typer.Option(
            "--next-sentence", help="For each pair, print the probability that the second text follows the first."
        ),
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate texts that exceed the context length instead of failing.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = InferenceDType.FLOAT32,
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, including the probability of every class.")
    ] = False,
) -> None:
    """Classify texts or pairs of texts.

    For each text, prints the class, its probability and the text, separated by tabs. For multi-label models, prints all
    labels with a probability of at least 0.5, separated by commas. For regression models, prints the predicted value
    and the text. To classify a pair, separate its two texts with a tab. Blank lines are not classified. For a blank
    line, prints a blank line or, with --json, an object that contains only the text.

    \b
    Examples:
      qkv classify sentiment "a charming and often affecting journey"
      printf 'A dog runs.\\tAn animal moves.\\n' | qkv classify my-entailment --json
      cut -f1 reviews.tsv | qkv classify sentiment > classes.tsv
      printf 'He was hungry.\\tHe ate an apple.\\n' | qkv classify bert --next-sentence
    """
    from qkv.tasks import TextEncoder

    task = DeviceOptions(device=device, dtype=dtype, backend=backend).load_task_as_and_print_remarks(TextEncoder, model)
    batches = tokenize_in_batches_and_report_truncation(
        task, split_tab_separated_pairs(iter_input_texts(texts)), truncate=truncate
    )
    predict = task.next_sentence_probability if next_sentence else task.classify
    for tokenized, result in map_tokenized_texts(batches, predict):
        if as_json:
            text = tokenized.texts[0] if len(tokenized.texts) == 1 else tokenized.texts
            print(json.dumps({"text": text, **_class_or_next_sentence_to_dict(result)}, ensure_ascii=False))
        elif result is None:
            print()
        else:
            print("\t".join((*_classification_columns(result), *map(escape_newlines, tokenized.texts))))


def _class_or_next_sentence_to_dict(result: "Classification | float | None") -> dict[str, object]:
    if result is None:
        return {}
    if isinstance(result, float | int):
        return {"next_sentence_probability": result}
    if result.value is not None:
        return {"value": result.value}
    return {"labels": result.labels, "probabilities": result.probabilities}


def _classification_columns(result: "Classification | float") -> list[str]:
    number = result if isinstance(result, float | int) else result.value
    if number is not None:
        return [f"{number:.4f}"]
    assert not isinstance(result, float | int)
    probabilities = ",".join(f"{result.probabilities[label]:.4f}" for label in result.labels)
    return [",".join(result.labels), probabilities]
