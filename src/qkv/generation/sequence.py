"""One text as it grows, and why it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from qkv.errors import ContextLengthError, InputError


class FinishReason(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    """It came to an end token, or its reader had enough."""
    LENGTH = "length"
    """It reached the number of new tokens asked for."""
    CONTEXT = "context"
    """The model has no more positions."""


@dataclass(frozen=True)
class LengthLimit:
    """How many new tokens a text may get, and what it means to have got them."""

    n_new: int
    finish_reason: FinishReason


@dataclass
class GeneratedSequence:
    """One row as it grows."""

    prompt: list[int]
    limit: LengthLimit
    new: list[int] = field(default_factory=list)
    """An end token, where it came to one, is the last of them."""
    log_probabilities: list[float] = field(default_factory=list)
    """Of each new token under the model itself, before temperature and filters."""
    finish_reason: FinishReason | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new]

    def add(self, number: int, log_probability: float, stop_ids: frozenset[int]) -> None:
        self.new.append(number)
        self.log_probabilities.append(log_probability)
        if number in stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.new) >= self.limit.max_new_tokens:
            self.finish_reason = self.limit.finish_reason


def new_sequences(prompts: Sequence[Sequence[int]], *, max_new: int, context_length: int) -> list[GeneratedSequence]:
    """The texts before their first new token; prompts that cannot go on are refused.

    The last new token is never read, so a prompt that fills the context still gets one.
    """
    if not prompts:
        raise InputError("there are 0 prompts; at least 1 is needed")
    if max_new < 1:
        raise InputError(f"{max_new} new tokens were asked for; at least 1 is needed")
    return [
        GeneratedSequence(list(prompt), _length_limit(row, len(prompt), max_new, context_length))
        for row, prompt in enumerate(prompts)
    ]


def _length_limit(row: int, n_prompt: int, max_new: int, context_length: int) -> LengthLimit:
    if n_prompt == 0:
        raise InputError(f"prompt {row} is empty: 0 tokens, there must be at least 1")
    if n_prompt > context_length:
        raise ContextLengthError(f"prompt {row} has {n_prompt} tokens; the model's context_length is {context_length}")
    room = context_length - n_prompt + 1
    return LengthLimit(max_new, FinishReason.LENGTH) if max_new <= room else LengthLimit(room, FinishReason.CONTEXT)
