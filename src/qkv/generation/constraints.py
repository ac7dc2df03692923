"""Lexical constraints for beam search, which specify terms that an output must contain, such as glossary entries."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class TermConstraints:
    """Token sequences that an output must contain contiguously, in any order."""

    def __init__(self, terms: Iterable[Sequence[int]]) -> None:
        self._terms = [term for term in dict.fromkeys(tuple(term) for term in terms) if term]
        self.n_tokens = sum(len(term) for term in self._terms)
        """Total number of tokens in all terms."""

    def n_satisfied_tokens(self, ids: list[int]) -> int:
        """Return the number of constraint tokens that have already been generated.

        This includes the tokens of all completed terms and of the longest partially generated term at the end of `ids`.
        """
        missing = self._missing_terms(ids)
        partial = max((_partial_term_length(ids, term) for term in missing), default=0)
        return self.n_tokens - sum(len(term) for term in missing) + partial

    def next_token_ids(self, ids: list[int]) -> set[int]:
        """Return the token ids that would start or continue a missing term."""
        return {term[_partial_term_length(ids, term)] for term in self._missing_terms(ids)}

    def _missing_terms(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [term for term in self._terms if not _contains_term(ids, term)]


def allocate_beams(ranked: Iterable[tuple[int, T]], n_beams: int) -> list[T]:
    """Select at most `n_beams` items from (satisfied tokens, item) pairs, which must be sorted best first.

    Items are grouped by the number of satisfied tokens and taken from the groups in round-robin order, starting with
    the group that satisfies the most tokens. Beams that satisfy more constraints have lower probabilities because they
    contain tokens that the model did not prefer. Ranking only by probability would drop all of these beams. The
    grouping follows arXiv:1704.07138, and the allocation follows arXiv:1804.06609.
    """
    banks: dict[int, list[T]] = {}
    for n_satisfied, item in ranked:
        banks.setdefault(n_satisfied, []).append(item)
    queues = [iter(banks[n_satisfied]) for n_satisfied in sorted(banks, reverse=True)]
    selected: list[T] = []
    while queues and len(selected) < n_beams:
        queues = [queue for queue in queues if len(selected) < n_beams and _move_next_item(queue, selected)]
    return selected


def _move_next_item(queue: Iterable[T], selected: list[T]) -> bool:
    """Append the next item of `queue` to `selected`. Returns `False` if the queue is empty."""
    for item in queue:
        selected.append(item)
        return True
    return False


def _contains_term(ids: list[int], term: tuple[int, ...]) -> bool:
    return any(tuple(ids[i : i + len(term)]) == term for i in range(len(ids) - len(term) + 1))


def _partial_term_length(ids: list[int], term: tuple[int, ...]) -> int:
    """Return the length of the longest proper prefix of `term` at the end of `ids`."""
    longest = min(len(term) - 1, len(ids))
    return next((n for n in range(longest, 0, -1) if tuple(ids[-n:]) == term[:n]), 0)
