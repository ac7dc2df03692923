"""`qkv generate`: a text goes on."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.config import SamplingConfig
    from qkv.tasks import LanguageModel


def generate(
    model: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, or a Hugging Face folder.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(help="What to go on from; none: one a line from stdin.")
    ] = None,
    *,
    max_new: Annotated[int, typer.Option("--max-new", "-n", min=1, help="Most new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest; below 1 sharper, above 1 flatter.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the fewest that reach p together.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out what is less than this share of the likeliest.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: say less again.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this string; may be given again.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Where chance starts.")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print each piece as it comes.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt, with ids and log-probabilities.")
    ] = False,
) -> None:
    """Go on from a prompt; the prompt itself is printed too.

    \b
    Examples:
      qkv generate run "Once upon a time"
      qkv generate run "The sea" --temperature 0.5 --max-new 50 --seed 7
      printf 'One day\\nIt was\\n' | qkv generate run --json
    """
    from qkv.config import SamplingConfig
    from qkv.tasks import load

    wanted = prompts or [line.rstrip("\n") for line in sys.stdin]
    if not wanted:
        raise InputError("no prompt was given, and standard input is empty")
    sampling = SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    task = load(model)
    if stream:
        _stream(task, wanted, max_new=max_new, stop=stop or [], sampling=sampling)
        return
    for prompt, text in zip(
        wanted, task.continue_all(wanted, max_new=max_new, stop=stop or [], sampling=sampling), strict=True
    ):
        if as_json:
            result = {
                "prompt": prompt, "text": text.text, "ids": text.ids,
                "log_probabilities": text.log_probabilities, "ended": text.ended,
            }  # fmt: skip
            print(json.dumps(result, ensure_ascii=False))
        else:
            print(prompt + text.text)


def _stream(
    task: "LanguageModel", prompts: list[str], *, max_new: int, stop: list[str], sampling: "SamplingConfig"
) -> None:
    for row, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        own = sampling.replace(seed=sampling.seed + row)
        for piece in task.stream(prompt, max_new=max_new, stop=stop, sampling=own):
            print(piece, end="", flush=True)
        print()
