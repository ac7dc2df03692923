"""`qkv demo`: what can the shipped models do?"""

import shlex
from contextlib import redirect_stdout
from io import StringIO
from textwrap import fill
from typing import Annotated

import typer

from qkv.cli.text_tables import WIDTH

SHOWN = (
    (
        "A story, token by token, by a GPT",
        'generate stories "One day, a robot found a flower" --max-new 150 --temperature 0.6',
    ),
    (
        "A translation; 1-2 says that target word 2 was read off source word 1, counted from 0",
        'translate es-en "La casa blanca está cerca del río." --alignment',
    ),
    ("A hidden word, guessed by a BERT", 'fill bert "She opened the [MASK] and went outside." -n 3'),
    (
        "A sentence about a film, judged by the same BERT, fine-tuned",
        'classify sentiment "a charming and often affecting journey"',
    ),
    (
        "What training GPT-2 takes, before it is spent",
        "cost plan --params 124M --tokens 2.5B --device h200 --price 3.5",
    ),
)
"""What is said of each command, and what is typed."""


def demo(
    *,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End after the prints.")] = False,
    port: Annotated[int, typer.Option(metavar="N", help="Where the explorer is served, on this machine alone.")] = 8477,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """A story, a translation, a filled mask, a classified sentence, a cost; then the explorer, until Ctrl-C.

    Each is what the command above it prints.

    \b
    Examples:
      qkv demo
      qkv demo --no-serve
      qkv demo --port 9000 --no-browser
    """
    for caption, line in SHOWN:
        print(f"{caption}\n$ qkv {line}", flush=True)
        for printed in printed_by(line).splitlines():
            print(fill(printed, WIDTH, initial_indent="    ", subsequent_indent="    "))
        print(flush=True)
    if no_serve:
        return
    from qkv.cli.explore import explore

    print(f"See inside them\n$ qkv explore --port {port}\n", flush=True)
    explore(None, port=port, no_browser=no_browser)


def printed_by(line: str) -> str:
    """What that command prints, run in this process: torch is read once for all."""
    from qkv.cli import app

    with redirect_stdout(StringIO()) as printed:
        app(shlex.split(line), prog_name="qkv", standalone_mode=False)
    return printed.getvalue()
