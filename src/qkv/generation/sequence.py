"""Token sequences that grow during generation, and the conditions that end them: length limits and stop strings."""

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


class StopStringFilter:
    """Filter that detects stop strings in streamed text.

    Text that could be the beginning of a stop string is buffered until more text arrives.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InputError("stop strings must have at least 1 character, got an empty string")
        self._strings = tuple(strings)
        self._buffer = ""
        self.is_stopped = False

    def feed(self, chunk: str) -> str:
        """Add a chunk of text and return the text that can be emitted now, without the stop string."""
        self._buffer += chunk
        matches = [(at + len(string), at) for string in self._strings if (at := self._buffer.find(string)) >= 0]
        if matches:
            # Use the match that ends first, as if the text had arrived one character at a time. The result
            # therefore does not depend on how the text is split into chunks.
            self.is_stopped = True
            emitted, self._buffer = self._buffer[: min(matches)[1]], ""
            return emitted
        n_buffered = max((self._partial_match_length(string) for string in self._strings), default=0)
        split = len(self._buffer) - n_buffered
        emitted, self._buffer = self._buffer[:split], self._buffer[split:]
        return emitted

    def flush(self) -> str:
        """Return the buffered text at the end of the stream."""
        emitted, self._buffer = self._buffer, ""
        return emitted

    def _partial_match_length(self, string: str) -> int:
        """Return the length of the longest proper prefix of `string` at the end of the buffer."""
        for n in range(min(len(string) - 1, len(self._buffer)), 0, -1):
            if self._buffer.endswith(string[:n]):
                return n
        return 0


MIN_REPEATS = 4
"""Number of consecutive repeats at the end of a sequence that counts as an endless loop.

Natural text rarely contains this many repeats.
"""


def truncate_repetition(ids: Sequence[int]) -> list[int]:
    """Drop all but the first occurrence of a token pattern that repeats until the end of the sequence.

    Returns all ids if no pattern occurs at least `MIN_REPEATS` times in a row at the end.
    """
    n = len(ids)
    for period in range(1, n // MIN_REPEATS + 1):
        start = n - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if n - start >= MIN_REPEATS * period:
            return list(ids[: start + period])
    return list(ids)
