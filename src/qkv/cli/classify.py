"""`qkv classify`: which class has a text, or a pair?"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import DType
from qkv.cli.device_options import Device, Dtype, Place
from qkv.cli.model_argument import Model

if TYPE_CHECKING:
    from qkv.tasks import Classification


def classify(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    next_sentence: Annotated[
        bool, typer.Option("--next-sentence", help="Of pairs: the probability that the second follows the first.")
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long; else they are refused.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = DType.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text, with every probability.")] = False,
) -> None:
    """Print of each text its class, the probability and the text, with tabs between.

    Where a text may have several labels: those of at least 0.5 and their probabilities, with commas between, maybe
    none. Where the answer is a number: the number and the text. A pair is two columns with a tab between. Of a blank
    line nothing is said: a blank line, in JSON the text alone.

    \b
    Examples:
      qkv classify sentiment "a charming and often affecting journey"
      printf 'A dog runs.\\tAn animal moves.\\n' | qkv classify my-entailment --json
      cut -f1 reviews.tsv | qkv classify sentiment > classes.tsv
      printf 'He was hungry.\\tHe ate an apple.\\n' | qkv classify bert --next-sentence
    """
    from qkv.cli.text_inputs import answered, encoded, given_texts, in_a_line, pairs_where_tabs
    from qkv.tasks import TextEncoder

    task = Place(device=device, dtype=dtype).load_as(TextEncoder, model)
    read = encoded(task, pairs_where_tabs(given_texts(texts)), truncate=truncate)
    for one, answer in answered(read, task.next_sentence_probability if next_sentence else task.classify):
        if as_json:
            text = one.texts[0] if len(one.texts) == 1 else one.texts
            print(json.dumps({"text": text, **_as_dict(answer)}, ensure_ascii=False))
        else:
            print("" if answer is None else "\t".join((*_columns(answer), *map(in_a_line, one.texts))))


def _as_dict(answer: "Classification | float | None") -> dict[str, object]:
    if answer is None:
        return {}
    if isinstance(answer, float | int):
        return {"follows": answer}
    if answer.value is not None:
        return {"number": answer.value}
    return {"labels": answer.labels, "probabilities": answer.probabilities}


def _columns(answer: "Classification | float") -> list[str]:
    number = answer if isinstance(answer, float | int) else answer.value
    if number is not None:
        return [f"{number:.4f}"]
    assert not isinstance(answer, float | int)
    probabilities = ",".join(f"{answer.probabilities[label]:.4f}" for label in answer.labels)
    return [",".join(answer.labels), probabilities]
