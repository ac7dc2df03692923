"""`qkv generate --steps`: the candidates of every step, and how the settings revise their probabilities."""

import json
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qkv.cli.tokens import quoted_token_text, token_text

if TYPE_CHECKING:
    from qkv.config import SamplingConfig
    from qkv.tasks import LanguageModel

N_CANDIDATES = 5


def show_steps(
    task: "LanguageModel", prompts: list[str], *, max_new: int, stop: list[str], sampling: "SamplingConfig",
    as_json: bool,
) -> None:  # fmt: skip
    """One prompt after another, each with the seed it has in a batch."""
    for row, prompt in enumerate(prompts):
        own = sampling.replace(seed=sampling.seed + row)
        if as_json:
            steps = [found for found, _ in _steps(task, prompt, max_new=max_new, stop=stop, sampling=own)]
            print(json.dumps({"prompt": prompt, "steps": steps}, ensure_ascii=False))
            continue
        print(f"{prompt}\n  settings: {_settings(own)}\n")
        text = prompt
        for number, (found, shown) in enumerate(
            _steps(task, prompt, max_new=max_new, stop=stop, sampling=own), start=1
        ):
            _print_step(task, number, text, found["candidates"])
            text += shown
        print(f"{text}\n")


def _steps(
    task: "LanguageModel", prompt: str, *, max_new: int, stop: list[str], sampling: "SamplingConfig"
) -> Iterator[tuple[dict[str, Any], str]]:
    from qkv.generation import top_candidates

    for piece in task.stream_batch([prompt], max_new=max_new, stop=stop, sampling=sampling):
        step = piece.step
        shown = [
            {
                "id": one.id, "token": token_text(task.tokenizer, one.id), "probability": one.probability,
                "revised": one.revised, "chosen": one.is_chosen,
            }
            for one in top_candidates(step, sampling, n=N_CANDIDATES)
        ]  # fmt: skip
        yield {"id": step.id, "log_probability": step.log_probability, "candidates": shown}, piece.text


def _print_step(task: "LanguageModel", number: int, text: str, candidates: list[dict[str, Any]]) -> None:
    tokens = [quoted_token_text(task.tokenizer, one["id"]) for one in candidates]
    width = max(8, *map(_width, tokens))
    print(f"step {number}, after {json.dumps('…' + text[-40:] if len(text) > 40 else text, ensure_ascii=False)}")
    print(f"     {'token':{width}}     model   revised")
    for one, token in zip(candidates, tokens, strict=True):
        mark = "→" if one["chosen"] else " "
        padded = token + " " * (width - _width(token))
        revised = f"{one['revised']:9.4f}" if one["revised"] else "      out"
        print(f"   {mark} {padded} {one['probability']:9.4f} {revised}")
    print()


def _settings(sampling: "SamplingConfig") -> str:
    given = sampling.model_dump(exclude_none=True, exclude_defaults=True) | {"temperature": sampling.temperature}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _width(text: str) -> int:
    """Columns on the terminal: a wide character takes two, one that combines none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
