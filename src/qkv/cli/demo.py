"""`qkv demo`: what can the shipped models do?"""

from textwrap import fill
from typing import Annotated

import typer

WIDTH = 100
STORY = "One day, a robot found a flower"
SPANISH = "La casa blanca está cerca del río."
HIDDEN = "She opened the [MASK] and went outside."
REVIEW = "a charming and often affecting journey"


def demo(
    *,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="End after the prints.")] = False,
    port: Annotated[int, typer.Option(metavar="N", help="Where the explorer is served, on this machine alone.")] = 8477,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """A story, a translation, a filled mask, a classified sentence, a cost; then the explorer, until Ctrl-C.

    Above each stands the command that gives it, with all its numbers.

    \b
    Examples:
      qkv demo
      qkv demo --no-serve
      qkv demo --port 9000 --no-browser
    """
    for show in (_story, _translation, _filled, _classified, _cost):
        show()
    if no_serve:
        return
    from qkv.cli.explore import explore

    _say("See inside them", f"qkv explore --port {port}")
    explore(None, port=port, no_browser=no_browser)


def _say(caption: str, command: str, *lines: str) -> None:
    print(f"{caption}\n$ {command}")
    for line in lines:
        print(fill(line, WIDTH, initial_indent="    ", subsequent_indent="    "))
    print(flush=True)


def _story() -> None:
    from qkv.tasks import LanguageModel, load_as

    task = load_as(LanguageModel, "stories")
    text = task.generate(STORY, max_new=150, temperature=0.6, seed=0)
    command = f'qkv generate stories "{STORY}" --max-new 150 --temperature 0.6'
    _say("A story, token by token, by a GPT", command, *(STORY + text).splitlines())


def _translation() -> None:
    from qkv.tasks import Translator, load_as

    (one,) = load_as(Translator, "es-en").translations([SPANISH], attention=True)
    source, target = SPANISH.split(), one.text.split()
    looked = {} if one.attention is None else {j: i for i, j in one.attention.words()}
    aligned = "   ".join(f"{word} ← {source[looked[j]]}" for j, word in enumerate(target) if j in looked)
    command = f'qkv translate es-en "{SPANISH}" --alignment'
    _say("A translation, and where the decoder looked for each word", command, one.text, aligned)


def _filled() -> None:
    from qkv.tasks import TextEncoder, load_as

    (filled,) = load_as(TextEncoder, "bert").fill([HIDDEN], n=3)
    guesses = ", ".join(f"{guess.token} {guess.probability:.0%}" for guess in filled.masks[0])
    _say("A hidden word, guessed by a BERT", f'qkv fill bert "{HIDDEN}" -n 3', f"{filled.text}   ({guesses})")


def _classified() -> None:
    from qkv.tasks import TextEncoder, load_as

    (answer,) = load_as(TextEncoder, "sentiment").classify([REVIEW])
    (label,) = answer.labels
    said = f"{label}, {answer.probabilities[label]:.1%}"
    _say("A sentence about a film, judged by the same BERT, fine-tuned", f'qkv classify sentiment "{REVIEW}"', said)


def _cost() -> None:
    from qkv.cost import Mode, Precision, estimate

    batch = 8
    cost = estimate("gpt2", batch=batch, mode=Mode.TRAIN, dtype=Precision.MIXED)
    line = (
        f"{cost.parameters.total:,} parameters; one training step on {batch} texts of 1,024 tokens takes "
        f"{cost.flops.total / 1e12:.1f} TFLOP and {cost.memory.peak / 2**30:.1f} GiB"
    )
    _say("What GPT-2 costs, before it is spent", f"qkv cost gpt2 --mode train --batch {batch} --dtype mixed", line)
