"""Terms that a text must hold, such as a glossary's: how far it has come with them, and who goes on."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class TermConstraints:
    """Sequences of ids, each to stand in the text in one piece; in which order is free."""

    def __init__(self, terms: Iterable[Sequence[int]]) -> None:
        self._terms = [term for term in dict.fromkeys(tuple(term) for term in terms) if term]
        self.n_ids = sum(len(term) for term in self._terms)

    def n_reached(self, ids: list[int]) -> int:
        """Ids of the terms that stand there, and of the one that has been begun furthest."""
        missing = self._missing(ids)
        begun = max((_n_begun(ids, term) for term in missing), default=0)
        return self.n_ids - sum(len(term) for term in missing) + begun

    def wanted(self, ids: list[int]) -> set[int]:
        """What would go on with a term: each that is missing, from where it has come to."""
        return {term[_n_begun(ids, term)] for term in self._missing(ids)}

    def _missing(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [term for term in self._terms if not _holds(ids, term)]


def allocate_beams(ranked: Iterable[tuple[int, T]], n: int) -> list[T]:
    """The best n of (ids reached, item), taken in turn from each number reached, the greatest first.

    Those that have come further are less likely, as they had to take what they did not choose: by likelihood alone
    they would all be dropped (the idea of arXiv:1704.07138, with the places of arXiv:1804.06609).
    """
    banks: dict[int, list[T]] = {}
    for reached, item in ranked:
        banks.setdefault(reached, []).append(item)
    queues = [iter(banks[reached]) for reached in sorted(banks, reverse=True)]
    chosen: list[T] = []
    while queues and len(chosen) < n:
        queues = [queue for queue in queues if len(chosen) < n and _take(queue, chosen)]
    return chosen


def _take(queue: Iterable[T], chosen: list[T]) -> bool:
    for item in queue:
        chosen.append(item)
        return True
    return False


def _holds(ids: list[int], term: tuple[int, ...]) -> bool:
    return any(tuple(ids[i : i + len(term)]) == term for i in range(len(ids) - len(term) + 1))


def _n_begun(ids: list[int], term: tuple[int, ...]) -> int:
    """The longest beginning of the term that the ids end with, short of all of it."""
    longest = min(len(term) - 1, len(ids))
    return next((n for n in range(longest, 0, -1) if tuple(ids[-n:]) == term[:n]), 0)
