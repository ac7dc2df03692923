"""Token sequences that grow during generation, their length limits and finish reasons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from qkv.errors import ContextLengthError, InputError


class FinishReason(StrEnum):
    """Reason why the generation of a sequence stopped."""

    STOP = "stop"
    """The sequence reached a stop token, or the caller stopped it."""
    LENGTH = "length"
    """The sequence reached the requested number of new tokens."""
    CONTEXT = "context"
    """The sequence filled the model's context."""


@dataclass(frozen=True)
class LengthLimit:
    """Maximum number of new tokens, and the finish reason to report when it is reached."""

    max_new_tokens: int
    finish_reason: FinishReason


@dataclass
class GeneratedSequence:
    """A prompt and the tokens generated for it so far."""

    prompt: list[int]
    limit: LengthLimit
    new_ids: list[int] = field(default_factory=list)
    """Generated token ids, including the stop token if one was generated."""
    log_probabilities: list[float] = field(default_factory=list)
    """Log-probability of each new token according to the model, before temperature and filters."""
    finish_reason: FinishReason | None = None
    """Reason why generation stopped, or `None` while the sequence is still being generated."""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new_ids]

    def append_token(self, token_id: int, log_probability: float, stop_ids: frozenset[int]) -> None:
        """Append a new token and set `finish_reason` if the sequence is complete."""
        self.new_ids.append(token_id)
        self.log_probabilities.append(log_probability)
        if token_id in stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.new_ids) >= self.limit.max_new_tokens:
            self.finish_reason = self.limit.finish_reason


def new_sequences(prompts: Sequence[Sequence[int]], *, max_new: int, context_length: int) -> list[GeneratedSequence]:
    """Validate the prompts and create one sequence per prompt, without any new tokens.

    The model never reads the last new token, so a prompt that fills the context can still be extended by one token.
    """
    if not prompts:
        raise InputError("at least 1 prompt is required, got 0")
    if max_new < 1:
        raise InputError(f"max_new must be at least 1, got {max_new}")
    return [
        GeneratedSequence(list(prompt), _length_limit(row, len(prompt), max_new, context_length))
        for row, prompt in enumerate(prompts)
    ]


def _length_limit(row: int, prompt_length: int, max_new: int, context_length: int) -> LengthLimit:
    """Limit the new tokens of prompt `row` to `max_new` or to the free context, whichever is smaller."""
    if prompt_length == 0:
        raise InputError(f"prompt {row} must have at least 1 token, got 0")
    if prompt_length > context_length:
        raise ContextLengthError(
            f"prompt {row} has {prompt_length} tokens, which exceeds context_length={context_length}"
        )
    # This is one more than the free positions because the last new token is never fed back to the model.
    available = context_length - prompt_length + 1
    if max_new <= available:
        return LengthLimit(max_new, FinishReason.LENGTH)
    return LengthLimit(available, FinishReason.CONTEXT)
