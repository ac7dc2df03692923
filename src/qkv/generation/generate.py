"""Text goes on: prefill the prompt, then decode token by token with the cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation.sampling import NextLogits, adjusted, draw
from qkv.models import GPT
from qkv.nn import KVCache


class Ended(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    """It came to an end token, or its reader had enough."""
    LENGTH = "length"
    """It reached the number of new tokens asked for."""
    CONTEXT = "context"
    """The model has no more positions."""


@dataclass
class Text:
    """One row as it grows."""

    prompt: list[int]
    new: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    """Of each new token under the model itself, before temperature and filters."""
    ended: Ended | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step gave one row."""

    row: int
    id: int
    log_probability: float
    logits: Tensor
    """The model's own logits for this token."""
    text: Text


@torch.inference_mode()
def steps(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = frozenset(),
    seeds: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Each new token as it comes, row by row; a row whose `text.ended` is set by the reader is left out from then on.

    Rows have any lengths, and what a row says depends on its prompt and seed alone.
    """
    _check(model, prompts, max_new)
    texts = [Text(list(prompt)) for prompt in prompts]
    own = seeds if seeds is not None else [sampling.seed + row for row in range(len(texts))]
    chances = [torch.Generator().manual_seed(seed) for seed in own]
    rows = list(range(len(texts)))
    capacity = min(model.config.context_length, max(len(text.prompt) for text in texts) + max_new)
    cache = model.new_cache(batch=len(texts), capacity=capacity)
    logits = prefill(model, prompts, cache)
    while rows:
        chosen = draw(
            adjusted(logits, sampling, [texts[row].ids for row in rows]), [chances[row] for row in rows]
        ).tolist()
        log_p = logits.float().log_softmax(-1)
        for i, row in enumerate(rows):
            text = texts[row]
            text.new.append(chosen[i])
            text.log_probabilities.append(float(log_p[i, chosen[i]]))
            text.ended = _end(text, stop_ids, max_new, model.config.context_length)
            yield Step(row=row, id=chosen[i], log_probability=text.log_probabilities[-1], logits=logits[i], text=text)
        going = [i for i, row in enumerate(rows) if texts[row].ended is None]
        if len(going) < len(rows):
            cache.select(torch.tensor(going, dtype=torch.long, device=logits.device))
            rows = [rows[i] for i in going]
        if rows:
            last = torch.tensor([[texts[row].new[-1]] for row in rows], device=logits.device)
            logits = model(last, cache=cache)[:, -1]


def prefill(model: GPT, prompts: Sequence[Sequence[int]], cache: KVCache) -> NextLogits:
    """All prompts at once; the logits after each prompt's last token."""
    device = model.embedding.token.weight.device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    is_token = None
    if min(len(prompt) for prompt in prompts) < longest:
        is_token = torch.arange(longest, device=device)[None] < lengths[:, None]
    states = model.states(ids, is_token=is_token, cache=cache)
    last = states[torch.arange(len(prompts), device=device), lengths - 1]
    return model.unembedding(last[:, None])[:, 0]


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = frozenset(),
    watch: Callable[[Step], None] = lambda _step: None,
) -> list[Text]:
    """The finished texts, in the order of their prompts."""
    texts: dict[int, Text] = {}
    for step in steps(model, prompts, max_new=max_new, sampling=sampling, stop_ids=stop_ids):
        watch(step)
        texts[step.row] = step.text
    return [texts[row] for row in range(len(prompts))]


def _check(model: GPT, prompts: Sequence[Sequence[int]], max_new: int) -> None:
    if not prompts:
        raise InputError("there are 0 prompts; at least 1 is needed")
    if max_new < 1:
        raise InputError(f"{max_new} new tokens were asked for; at least 1 is needed")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {row} is empty: 0 tokens, there must be at least 1")
        if len(prompt) >= model.config.context_length:
            raise ContextLengthError(
                f"prompt {row} has {len(prompt)} tokens; the model's context_length is {model.config.context_length}, "
                "and a new token needs room"
            )


def _end(text: Text, stop_ids: frozenset[int], max_new: int, context_length: int) -> Ended | None:
    if text.new[-1] in stop_ids:
        return Ended.STOP
    if len(text.new) >= max_new:
        return Ended.LENGTH
    if len(text.prompt) + len(text.new) >= context_length:
        return Ended.CONTEXT
    return None
