"""Print the candidate tokens of every decoding step for `qkv generate --show-steps`."""

import json
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qkv.text.token_display import quoted_token_text, token_text_or_vocabulary_name

if TYPE_CHECKING:
    from qkv.config import SamplingConfig
    from qkv.tasks import LanguageModel

N_CANDIDATES = 5


def print_generation_steps(
    task: "LanguageModel",
    prompts: list[str],
    *,
    max_new_tokens: int,
    stop: list[str],
    sampling: "SamplingConfig",
    as_json: bool,
) -> None:
    """Generate text for one prompt after another, with the same seeds as in a batch, and print every step."""
    for row, prompt in enumerate(prompts):
        row_sampling = sampling.replace(seed=sampling.seed + row)
        steps = _iter_steps(task, prompt, max_new_tokens=max_new_tokens, stop=stop, sampling=row_sampling)
        if as_json:
            print(json.dumps({"prompt": prompt, "steps": [step for step, _ in steps]}, ensure_ascii=False))
            continue
        print(f"{prompt}\n  sampling: {_format_sampling(row_sampling)}\n")
        text = prompt
        for number, (step, new_text) in enumerate(steps, start=1):
            _print_step(task, number, text, step["candidates"])
            text += new_text
        print(f"{text}\n")


def _iter_steps(
    task: "LanguageModel", prompt: str, *, max_new_tokens: int, stop: list[str], sampling: "SamplingConfig"
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a dictionary for each decoding step, which includes the text that the step adds."""
    from qkv.generation import top_raw_and_processed_candidates

    for token in task.stream_batch([prompt], max_new=max_new_tokens, stop=stop, sampling=sampling):
        step = token.step
        candidates = [
            {
                "id": candidate.id,
                "token": token_text_or_vocabulary_name(task.tokenizer, candidate.id),
                "probability": candidate.probability,
                "sampling_probability": candidate.revised,
                "chosen": candidate.is_chosen,
            }
            for candidate in top_raw_and_processed_candidates(step, sampling, n=N_CANDIDATES)
        ]
        yield {"id": step.id, "log_probability": step.log_probability, "candidates": candidates}, token.text


def _print_step(task: "LanguageModel", number: int, text: str, candidates: list[dict[str, Any]]) -> None:
    tokens = [quoted_token_text(task.tokenizer, candidate["id"]) for candidate in candidates]
    width = max(8, *map(_display_width, tokens))
    context = json.dumps("…" + text[-40:] if len(text) > 40 else text, ensure_ascii=False)
    print(f"step {number}, after {context}")
    print(f"     {'token':{width}}     model  sampling")
    for candidate, token in zip(candidates, tokens, strict=True):
        mark = "→" if candidate["chosen"] else " "
        padded = token + " " * (width - _display_width(token))
        probability = candidate["sampling_probability"]
        sampling = f"{probability:9.4f}" if probability else " excluded"
        print(f"   {mark} {padded} {candidate['probability']:9.4f} {sampling}")
    print()


def _format_sampling(sampling: "SamplingConfig") -> str:
    settings = sampling.model_dump(exclude_none=True, exclude_defaults=True) | {"temperature": sampling.temperature}
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _display_width(text: str) -> int:
    """Return the number of terminal columns that a text occupies.

    A wide character occupies 2 columns, and a combining character occupies none.
    """
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
