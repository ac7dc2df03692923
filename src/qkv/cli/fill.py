"""`qkv fill`: which words were hidden?"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from qkv.choices import DType, SpecialToken
from qkv.cli.device_options import Device, Dtype, Place
from qkv.cli.model_argument import Model


def fill(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="So many guesses for each mask.")] = 5,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long; else they are refused.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = DType.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text.")] = False,
) -> None:
    """Fill the masks of each text: the filled text, then for each mask its likeliest words with probabilities.

    A mask is spelt as in the model's tokenizer: [MASK] in BERT's, <mask> in RoBERTa's. Several masks are guessed
    each for itself. Parts of words (##s) are offered only close behind a word. A line without a mask stays as it is.

    \b
    Examples:
      qkv fill bert "She opened the [MASK] and went outside."
      qkv fill bert "He drank a [MASK] of [MASK]." -n 3
      qkv fill bert --json < sentences.txt
    """
    from qkv.cli.progress import say
    from qkv.cli.text_inputs import answered, encoded, given_texts, in_a_line, is_blank
    from qkv.tasks import TextEncoder

    task = Place(device=device, dtype=dtype).load_as(TextEncoder, model)
    read = encoded(task, given_texts(texts), truncate=truncate, parse_special_tokens=True)
    n_texts, unmasked = 0, []
    for one, filled in answered(read, lambda some: task.fill_mask(some, n=n), asks=task.has_mask):
        n_texts += 1
        if filled is None and not is_blank(one.texts):
            unmasked.append(one.number)
        text = one.texts[0] if filled is None else filled.text
        masks = [] if filled is None else filled.predictions
        if as_json:
            said = {"text": one.texts[0], "filled": text, "masks": [[asdict(guess) for guess in mask] for mask in masks]}
            print(json.dumps(said, ensure_ascii=False))
            continue
        guesses = ["  ".join(f"{guess.token} {guess.probability:.4f}" for guess in mask) for mask in masks]
        print("\t".join([in_a_line(text), *guesses]))
    if unmasked:
        mask = task.tokenizer.special_tokens[SpecialToken.MASK]
        say(
            f"{len(unmasked):,} of {n_texts:,} texts have no {mask} and stay as they are; the first: text {unmasked[0]}"
        )
