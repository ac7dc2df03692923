"""`qkv fill`: which words were hidden?"""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def fill(
    model: Annotated[str, typer.Argument(help="A shipped name, a run folder, a Hugging Face folder, or a file.")],
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="So many guesses for each mask.")] = 5,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text.")] = False,
) -> None:
    """Fill the masks of each text: the filled text, then for each mask its likeliest words with probabilities.

    A mask is spelt as in the model's tokenizer: [MASK] in BERT's, <mask> in RoBERTa's. Several masks are guessed
    each for itself.

    \b
    Examples:
      qkv fill bert "Paris is the [MASK] of France."
      qkv fill bert "The [MASK] sat on the [MASK]." -n 3
      qkv fill bert --json < sentences.txt
    """
    from qkv.cli.texts import encoded, given_texts, load_encoder

    task = load_encoder(model)
    for read in encoded(task, given_texts(texts), truncate=truncate, parse_specials=True):
        for one, filled in zip(read, task.fill(read, n=n), strict=True):
            if as_json:
                said = {"text": one.row[0], "filled": filled.text, "masks": asdict(filled)["masks"]}
                print(json.dumps(said, ensure_ascii=False))
                continue
            guesses = ["  ".join(f"{guess.token} {guess.probability:.4f}" for guess in mask) for mask in filled.masks]
            print("\t".join([filled.text, *guesses]))
