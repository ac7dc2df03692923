"""Beam search with length normalization, n-gram blocking and lexical constraints."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isnan
from typing import TypeVar

import torch
from torch import Tensor

from qkv.config import BeamConfig
from qkv.errors import InputError, WeightsError
from qkv.generation.decode_engine import DecodeEngine, EngineFactory, eager_engine
from qkv.generation.sampling import NextLogits
from qkv.generation.sequence import FinishReason, LengthLimit, new_sequences
from qkv.models import GPT

T = TypeVar("T")
NO_IDS: frozenset[int] = frozenset()
IMPOSSIBLE = float("-inf")
_TopK = tuple[list[list[float]], list[list[int]], list[list[float]]]
"""Result of a top-k search: lists of total log-probabilities, flat indices and token log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A finished output of beam search."""

    ids: list[int]
    """New token ids, including the stop token if one was generated."""
    log_probabilities: list[float]
    score: float
    """Sum of the log-probabilities divided by (number of new ids)^length_penalty."""
    finish_reason: FinishReason


def beam_generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    beam: BeamConfig,
    stop_ids: frozenset[int] = NO_IDS,
    create_engine: EngineFactory = eager_engine,
) -> list[list[Hypothesis]]:
    """Continue each prompt with beam search and return the `beam.n_best` hypotheses for each prompt, best first.

    Prompts may have different lengths. `create_engine` selects the implementation of the model (default: eager).
    """
    sequences = new_sequences(prompts, max_new=max_new, context_length=model.config.context_length)
    capacity = max(len(sequence.prompt) + sequence.limit.max_new_tokens - 1 for sequence in sequences)
    with torch.inference_mode(), closing(create_engine(model, batch=len(sequences), capacity=capacity)) as engine:
        logits = engine.prefill(prompts)
        return beam_search(engine, logits, [sequence.limit for sequence in sequences], beam=beam, stop_ids=stop_ids)


@torch.inference_mode()
def beam_search(
    engine: DecodeEngine,
    logits: NextLogits,
    limits: Sequence[LengthLimit],
    *,
    beam: BeamConfig,
    stop_ids: frozenset[int] = NO_IDS,
    constraints: Sequence[Sequence[Sequence[int]]] = (),
    suppressed_ids: frozenset[int] = NO_IDS,
) -> list[list[Hypothesis]]:
    """Run beam search with an engine that contains one row per sequence and has just returned `logits`.

    Each step keeps the `n_beams` most probable one-token continuations. A beam that generates a stop token is finished
    and leaves the search. The search for a sequence ends when it has `n_beams` finished hypotheses and no running beam
    has a better score than the worst of these hypotheses. `constraints` contains, for each sequence, the terms (as
    token ids) that its output must contain. `suppressed_ids` are never generated.
    """
    terms = [TermConstraints(sequence_terms) for sequence_terms in constraints] or [TermConstraints([]) for _ in limits]
    searches = [_SequenceBeams(limit, beam, stop_ids, term) for limit, term in zip(limits, terms, strict=True)]
    running = searches
    suppressed = torch.tensor(sorted(suppressed_ids), dtype=torch.long, device=logits.device)
    while True:
        # Up to n_beams · len(stop_ids) of the best continuations may be stop tokens, which finish a beam. Fetching this
        # many more ensures that n_beams continuations remain.
        continuations = _best_continuations(running, logits, suppressed, n=beam.n_beams * (1 + len(stop_ids)))
        width = len(running[0].beams)
        for search, search_continuations in zip(running, continuations, strict=True):
            search.advance(search_continuations)
        unfinished = [index for index, search in enumerate(running) if not search.is_done]
        if not unfinished:
            return [search.best(index) for index, search in enumerate(searches)]
        rows = [index * width + beam_.parent for index in unfinished for beam_ in running[index].beams]
        remaining_indices = None if len(unfinished) == len(running) else torch.tensor(unfinished, device=logits.device)
        running = [running[index] for index in unfinished]
        if remaining_indices is not None or rows != list(range(len(rows))):
            common_prefix = min(search.common_prefix for search in running)
            engine.reorder(
                torch.tensor(rows, device=logits.device), sequences=remaining_indices, common_prefix=common_prefix
            )
        latest = [beam_.ids[-1] for search in running for beam_ in search.beams]
        logits = engine.decode(torch.tensor(latest, device=logits.device))


@dataclass(frozen=True, slots=True)
class _Beam:
    """A running beam. Beams with a total of −∞ serve only to pad the batch to `n_beams` rows."""

    ids: list[int]
    log_p: list[float]
    total: float
    parent: int = 0
    """Index of the beam from the previous step that this beam continues."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam from the previous step, extended by one token."""

    total: float
    parent: int
    id: int
    log_p: float


def _best_continuations(
    searches: list["_SequenceBeams"], logits: NextLogits, suppressed: Tensor, *, n: int
) -> list[list[_Continuation]]:
    """Return the best one-token continuations for each search, best first.

    Without constraints, these are the `n` best over all beams of a search. With constraints, these are the `n` best of
    each beam, plus the tokens that continue a constraint.
    """
    beams = [beam for search in searches for beam in search.beams]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # Forbidden tokens are masked only in `totals` so that `log_p` remains the log-probability under the model.
    log_p = logits.to(dtype).log_softmax(-1)
    sums = torch.tensor([beam.total for beam in beams], dtype=dtype, device=logits.device)
    totals = sums[:, None] + log_p
    if len(suppressed):
        totals[:, suppressed] = IMPOSSIBLE
    forbidden = [(row, token_id) for row, beam in enumerate(beams) for token_id in searches[0].forbidden_ids(beam.ids)]
    if forbidden:
        totals[tuple(torch.tensor(forbidden, device=logits.device).T)] = IMPOSSIBLE
    has_constraints = any(search.constraints.n_tokens for search in searches)
    rows_per_table = 1 if has_constraints else len(searches[0].beams)
    best = totals.view(len(beams) // rows_per_table, -1)
    best, indices = best.topk(min(n, best.shape[1]))
    best_log_p = log_p.view(len(best), -1).gather(1, indices)
    top_k = (best.tolist(), indices.tolist(), best_log_p.tolist())
    if any(isnan(row[0]) for row in top_k[0]):  # topk sorts NaN before every number
        raise WeightsError(f"logits became NaN after generating {len(beams[0].ids)} tokens")
    return _continuations_by_search(searches, top_k, log_p, totals)


def _continuations_by_search(
    searches: list["_SequenceBeams"], top_k: _TopK, log_p: Tensor, totals: Tensor
) -> list[list[_Continuation]]:
    """Convert the top-k tables to a list of continuations for each search."""
    vocab_size, width = log_p.shape[1], len(searches[0].beams)
    n_tables = len(top_k[0]) // len(searches)  # 1 per search, or 1 per beam with constraints
    result: list[list[_Continuation]] = []
    for number, search in enumerate(searches):
        continuations = [
            _Continuation(total, table + index // vocab_size, index % vocab_size, token_log_p)
            for table in range(n_tables)
            for total, index, token_log_p in zip(*(part[number * n_tables + table] for part in top_k), strict=True)
            if total > IMPOSSIBLE
        ]
        if n_tables > 1 or search.constraints.n_tokens:
            rows = slice(number * width, (number + 1) * width)
            continuations += _new_constraint_continuations(search, continuations, log_p[rows], totals[rows])
            continuations = sorted(continuations, key=lambda continuation: -continuation.total)
        result.append(continuations)
    return result


def _new_constraint_continuations(
    search: "_SequenceBeams", continuations: list[_Continuation], log_p: Tensor, totals: Tensor
) -> list[_Continuation]:
    """Return the continuations that advance a constraint and are not already in `continuations`."""
    existing = {(continuation.parent, continuation.id) for continuation in continuations}
    wanted = [
        (parent, token_id)
        for parent, beam in enumerate(search.beams)
        for token_id in sorted(search.constraint_advancing_or_stop_ids(beam.ids))
    ]
    return [
        _Continuation(float(totals[parent, token_id]), parent, token_id, float(log_p[parent, token_id]))
        for parent, token_id in wanted
        if (parent, token_id) not in existing and float(totals[parent, token_id]) > IMPOSSIBLE
    ]


def _common_prefix_length(sequences: list[list[int]]) -> int:
    """Return the number of leading ids that all sequences share.

    This equals the common prefix length of the lexicographically smallest and largest sequences.
    """
    first, last = min(sequences), max(sequences)
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


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


class _SequenceBeams:
    """Beam search state for one sequence: running beams and at most `n_beams` finished hypotheses, best first."""

    def __init__(
        self, limit: LengthLimit, beam: BeamConfig, stop_ids: frozenset[int], constraints: TermConstraints
    ) -> None:
        if constraints.n_tokens > limit.max_new_tokens:
            raise InputError(
                f"the constraints have {constraints.n_tokens} tokens, but at most {limit.max_new_tokens} tokens may be "
                "generated"
            )
        self.constraints = constraints
        self.beams = [_Beam([], [], 0.0)]
        self._limit, self._config, self._stop_ids = limit, beam, stop_ids
        self._finished: list[Hypothesis] = []
        self.common_prefix = 0
        """Number of leading ids that all beams shared before the latest step."""

    def forbidden_ids(self, ids: list[int]) -> set[int]:
        """Return ids that must not follow: stop ids before the minimum length, and ids that would repeat an n-gram."""
        forbidden: set[int] = set()
        if len(ids) < self._config.min_new_tokens:
            forbidden |= self._stop_ids
        n = self._config.no_repeat_ngram_size
        if n is not None and len(ids) >= n:
            tail = ids[len(ids) - n + 1 :]
            forbidden |= {ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == tail}
        return forbidden

    def constraint_advancing_or_stop_ids(self, ids: list[int]) -> set[int]:
        """Return the ids that advance a constraint, or the stop ids if all constraints are satisfied."""
        if self.constraints.n_tokens == 0:
            return set()
        return self.constraints.next_token_ids(ids) or set(self._stop_ids)

    def advance(self, continuations: list[_Continuation]) -> None:
        """Replace the beams with their best continuations and finish those that end with a stop token."""
        n_beams, is_constrained = self._config.n_beams, self.constraints.n_tokens > 0
        self.common_prefix = _common_prefix_length([beam.ids for beam in self.beams])
        unfinished: list[_Beam] = []
        for rank, continuation in enumerate(continuations):
            parent = self.beams[continuation.parent]
            beam = _Beam(
                [*parent.ids, continuation.id],
                [*parent.log_p, continuation.log_p],
                continuation.total,
                continuation.parent,
            )
            if continuation.id not in self._stop_ids:
                unfinished.append(beam)
                if len(unfinished) == n_beams and not is_constrained:
                    break  # any later stop tokens are not among the n_beams best continuations
            elif (rank < n_beams or is_constrained) and self._is_complete(beam):
                self._finish(beam, FinishReason.STOP)
        if is_constrained:
            unfinished = self._select_constrained(unfinished)
        self.beams = unfinished[:n_beams]
        if self.beams and len(self.beams[0].ids) >= self._limit.max_new_tokens:
            for beam in filter(self._is_complete, self.beams):
                self._finish(beam, self._limit.finish_reason)
            self.beams = []
        if self.beams:
            # All searches of a batch have n_beams rows, so missing beams are replaced by impossible copies.
            first = self.beams[0]
            self.beams += [_Beam(first.ids, [], IMPOSSIBLE, first.parent)] * (n_beams - len(self.beams))

    @property
    def is_done(self) -> bool:
        """Whether no beam is running, or no running beam can improve on the finished hypotheses."""
        if not self.beams:
            return True
        best = self.beams[0]
        is_full = len(self._finished) == self._config.n_beams
        return is_full and self._finished[-1].score >= self._score(best.total, len(best.ids))

    def best(self, index: int) -> list[Hypothesis]:
        """Return the `n_best` finished hypotheses. `index` identifies the sequence in error messages."""
        if not self._finished:
            raise InputError(
                f"sequence {index}: no output of at most {self._limit.max_new_tokens} tokens satisfies all settings "
                f"(constraints of {self.constraints.n_tokens} tokens, min_new_tokens={self._config.min_new_tokens}, "
                f"no_repeat_ngram_size={self._config.no_repeat_ngram_size})"
            )
        return self._finished[: self._config.n_best]

    def _select_constrained(self, beams: list[_Beam]) -> list[_Beam]:
        """Select beams that can still satisfy all constraints, with different numbers of satisfied tokens."""
        progress = [(self.constraints.n_satisfied_tokens(beam.ids), beam) for beam in beams]
        n_left = self._limit.max_new_tokens - len(beams[0].ids) if beams else 0
        feasible = [(n, beam) for n, beam in progress if self.constraints.n_tokens - n <= n_left]
        return sorted(allocate_beams(feasible, self._config.n_beams), key=lambda beam: -beam.total)

    def _is_complete(self, beam: _Beam) -> bool:
        n_tokens = self.constraints.n_tokens
        return n_tokens == 0 or self.constraints.n_satisfied_tokens(beam.ids) == n_tokens

    def _finish(self, beam: _Beam, finish_reason: FinishReason) -> None:
        score = self._score(sum(beam.log_p), len(beam.ids))
        self._finished.append(
            Hypothesis(ids=beam.ids, log_probabilities=beam.log_p, score=score, finish_reason=finish_reason)
        )
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._config.n_beams :]

    def _score(self, total: float, length: int) -> float:
        return total / length**self._config.length_penalty
