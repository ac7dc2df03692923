"""Detect stop strings in streamed text, and endless repetition."""

from collections.abc import Sequence

from qkv.errors import InputError

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
