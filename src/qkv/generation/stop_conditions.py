"""Ending a text: at a string, wherever the tokens happen to part it; or where it does nothing but repeat itself."""

from collections.abc import Sequence

from qkv.errors import InputError

MIN_REPEATS = 4
"""So often in a row to the end: a loop, of which a language has fewer by itself."""


def truncate_repetition(ids: Sequence[int]) -> list[int]:
    """Up to the end of the first round of what they repeat to their end; all, where they do not."""
    n = len(ids)
    for period in range(1, n // MIN_REPEATS + 1):
        start = n - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if n - start >= MIN_REPEATS * period:
            return list(ids[: start + period])
    return list(ids)


class StopStrings:
    """Fed piece by piece; gives back what may be shown, holding back what might yet become a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise InputError("a stop string is empty: 0 characters, there must be at least 1")
        self._strings = tuple(strings)
        self._held = ""
        self.is_stopped = False

    def feed(self, piece: str) -> str:
        """What to show of the text so far unseen; a stop string itself is never shown."""
        self._held += piece
        found = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            # The one that is complete first, as if letters came one by one: how the text is parted changes nothing.
            self.is_stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        n_kept = max((self._n_begun(string) for string in self._strings), default=0)
        cut = len(self._held) - n_kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The rest, once no more comes."""
        shown, self._held = self._held, ""
        return shown

    def _n_begun(self, string: str) -> int:
        """Characters at the end that are the beginning of this string."""
        for n in range(min(len(string) - 1, len(self._held)), 0, -1):
            if self._held.endswith(string[:n]):
                return n
        return 0
