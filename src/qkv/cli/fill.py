"""The `qkv fill` command."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from qkv.choices import BackendName, InferenceDType, SpecialToken
from qkv.cli.options import (
    BackendOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    ModelArgument,
    escape_newlines,
    is_blank,
    iter_input_texts,
    map_tokenized_texts,
    tokenize_in_batches_and_report_truncation,
)
from qkv.cli.output import print_status


def fill(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts with masks. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    top_k: Annotated[int, typer.Option("--top-k", "-n", min=1, help="Number of predictions per mask.")] = 5,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate texts that exceed the context length instead of failing.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = InferenceDType.FLOAT32,
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per text.")] = False,
) -> None:
    """Predict the masked words of each text.

    Prints the filled text, followed by the most likely tokens and their probabilities for each mask. The mask token
    depends on the model's tokenizer: [MASK] for BERT, <mask> for RoBERTa. If a text has several masks, each mask is
    predicted independently. Word continuations (such as ##s) are predicted only directly after a word. Texts without a
    mask are printed unchanged.

    \b
    Examples:
      qkv fill bert "She opened the [MASK] and went outside."
      qkv fill bert "He drank a [MASK] of [MASK]." -n 3
      qkv fill bert --json < sentences.txt
    """
    from qkv.tasks import TextEncoder

    task = DeviceOptions(device=device, dtype=dtype, backend=backend).load_task_as_and_print_remarks(TextEncoder, model)
    batches = tokenize_in_batches_and_report_truncation(
        task, iter_input_texts(texts), truncate=truncate, parse_special_tokens=True
    )
    n_texts, unmasked = 0, []
    for tokenized, filled in map_tokenized_texts(
        batches, lambda batch: task.fill_mask(batch, n=top_k), is_included=task.has_mask
    ):
        n_texts += 1
        if filled is None and not is_blank(tokenized.texts):
            unmasked.append(tokenized.number)
        text = tokenized.texts[0] if filled is None else filled.text
        masks = [] if filled is None else filled.predictions
        if as_json:
            predictions = [[asdict(prediction) for prediction in mask] for mask in masks]
            result = {"text": tokenized.texts[0], "filled": text, "masks": predictions}
            print(json.dumps(result, ensure_ascii=False))
            continue
        columns = [
            "  ".join(f"{prediction.token} {prediction.probability:.4f}" for prediction in mask) for mask in masks
        ]
        print("\t".join([escape_newlines(text), *columns]))
    if unmasked:
        mask_token = task.tokenizer.special_tokens[SpecialToken.MASK]
        print_status(
            f"{len(unmasked):,} of {n_texts:,} texts contain no {mask_token} and were printed unchanged "
            f"(first: text {unmasked[0]})"
        )
