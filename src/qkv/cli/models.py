"""`qkv models`: what is shipped."""

import json
from typing import Annotated

import typer

from qkv.cli.columns import table


def models(*, as_json: Annotated[bool, typer.Option("--json", help="One JSON object a model.")] = False) -> None:
    """List the shipped models: what each does, how large it is, and its held-out scores.

    \b
    Examples:
      qkv models
      qkv models --json
    """
    from qkv.zoo import read_card, shipped

    cards = [read_card(folder) for folder in shipped().values()]
    if as_json:
        for card in cards:
            print(json.dumps({
                "name": card.name, "task": card.task, "summary": card.summary, "parameters": card.parameters,
                "bytes": card.n_bytes, "licence": card.licence, "scores": card.scores, "folder": str(card.folder),
            }, ensure_ascii=False))  # fmt: skip
        return
    rows = [
        (card.name, card.task, f"{card.parameters:,}", f"{card.n_bytes / 2**20:.1f} MiB",
         _what(card.summary, card.scores))
        for card in cards
    ]  # fmt: skip
    print("\n".join(table(["NAME", "TASK", "PARAMETERS", "ON DISK", "WHAT IT DOES"], rows, left=5)))


def _what(summary: str, scores: dict[str, float]) -> str:
    return " · ".join([summary, *(f"{name} {value:g}" for name, value in scores.items())])
