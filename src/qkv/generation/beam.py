"""Beam search: the likeliest whole text, as far as a few running guesses can find it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from qkv.config import BeamConfig
from qkv.errors import InputError, WeightsError
from qkv.generation.constraints import TermConstraints, allocate_beams
from qkv.generation.cpu_decode_engine import create_cpu_decode_engine
from qkv.generation.decoder import Decoder, GPTDecoder
from qkv.generation.prepacked_weights import PrepackedWeights, prepack_weights
from qkv.generation.sampling import NextLogits
from qkv.generation.sequence import FinishReason, LengthLimit, new_sequences
from qkv.models import GPT

NO_STOPS: frozenset[int] = frozenset()
NEVER = float("-inf")
_Tables = tuple[list[list[float]], list[list[int]], list[list[float]]]
"""Sums, where found, and log p."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One whole text that the search found."""

    ids: list[int]
    """The new ones; an end token, where it came to one, is the last."""
    log_probabilities: list[float]
    score: float
    """Σ log p ÷ (number of new ids)^length_penalty."""
    finish_reason: FinishReason


def beam_generate(
    model: GPT, prompts: Sequence[Sequence[int]], *, max_new: int, beam: BeamConfig,
    stop_ids: frozenset[int] = NO_STOPS, packing: PrepackedWeights | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """The best `beam.n_best` texts after each prompt, best first; prompts have any lengths."""
    texts = new_sequences(prompts, max_new=max_new, context_length=model.config.context_length)
    capacity = max(len(text.prompt) + text.limit.max_new_tokens - 1 for text in texts)
    with torch.inference_mode():
        lean = create_cpu_decode_engine(model, packing or prepack_weights(model), capacity=capacity)
        decoder = GPTDecoder(model, batch=len(texts), capacity=capacity, cpu_engine=lean)
        logits = decoder.prefill(prompts)
    return beam_search(decoder, logits, [text.limit for text in texts], beam=beam, stop_ids=stop_ids)


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    logits: NextLogits,
    limits: Sequence[LengthLimit],
    *,
    beam: BeamConfig,
    stop_ids: frozenset[int] = NO_STOPS,
    forced: Sequence[Sequence[Sequence[int]]] = (),
    never: frozenset[int] = NO_STOPS,
) -> list[list[Hypothesis]]:
    """For any decoder that stands at the beginning of as many texts as there are limits, one row a text.

    Each step keeps the `n_beams` likeliest of all one-token continuations. One that ends leaves the beam and
    is kept as finished. A text is done when it has `n_beams` finished ones and no running one scores better,
    as it stands, than the worst of them. `forced`: for each text the terms, as ids, that it must hold; `never`: ids
    that none may hold.
    """
    terms = [TermConstraints(own) for own in forced] or [TermConstraints([]) for _ in limits]
    texts = [_Text(limit, beam, stop_ids, own) for limit, own in zip(limits, terms, strict=True)]
    running, all_texts = texts, texts
    forbidden = torch.tensor(sorted(never), dtype=torch.long, device=logits.device)
    while True:
        continued = _best_continuations(running, logits, forbidden, n=beam.n_beams * (1 + len(stop_ids)))
        width = len(running[0].guesses)
        for text, own in zip(running, continued, strict=True):
            text.advance(own)
        going = [place for place, text in enumerate(running) if not text.is_done]
        if not going:
            return [text.best(number) for number, text in enumerate(all_texts)]
        rows = [place * width + guess.of for place in going for guess in running[place].guesses]
        kept = None if len(going) == len(running) else torch.tensor(going, device=logits.device)
        running = [running[place] for place in going]
        if kept is not None or rows != list(range(len(rows))):
            common_prefix = min(text.common_prefix for text in running)
            decoder.reorder(torch.tensor(rows, device=logits.device), sequences=kept, common_prefix=common_prefix)
        latest = [guess.ids[-1] for text in running for guess in text.guesses]
        logits = decoder.step(torch.tensor(latest, device=logits.device))


@dataclass(frozen=True, slots=True)
class _Guess:
    """A running text; one of sum −∞ only fills a row."""

    ids: list[int]
    log_p: list[float]
    total: float
    of: int = 0
    """Which guess of the step before it goes on from."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    total: float
    of: int
    id: int
    log_p: float


def _best_continuations(
    texts: list["_Text"], logits: NextLogits, never: Tensor, *, n: int
) -> list[list[_Continuation]]:
    """Of each text, best first: the n likeliest; where terms are forced, those of each guess and what terms want."""
    guesses = [guess for text in texts for guess in text.guesses]
    wide = torch.promote_types(logits.dtype, torch.float32)
    # Forbidden below, not here: a log p stays the model's own.
    log_p = logits.to(wide).log_softmax(-1)
    sums = torch.tensor([guess.total for guess in guesses], dtype=wide, device=logits.device)
    totals = sums[:, None] + log_p
    if len(never):
        totals[:, never] = NEVER
    forbidden = [(row, number) for row, guess in enumerate(guesses) for number in texts[0].forbidden(guess.ids)]
    if forbidden:
        totals[tuple(torch.tensor(forbidden, device=logits.device).T)] = NEVER
    n_rows = 1 if any(text.terms.n_ids for text in texts) else len(texts[0].guesses)
    best = totals.view(len(guesses) // n_rows, -1)
    best, found = best.topk(min(n, best.shape[1]))
    of_found = log_p.view(len(best), -1).gather(1, found)
    tables = (best.tolist(), found.tolist(), of_found.tolist())
    if any(isnan(row[0]) for row in tables[0]):  # which sorts before every number
        raise WeightsError(f"after {len(guesses[0].ids)} new tokens the logits are no numbers (NaN)")
    return _by_text(texts, tables, log_p, totals)


def _by_text(texts: list["_Text"], tables: _Tables, log_p: Tensor, totals: Tensor) -> list[list[_Continuation]]:
    size, width = log_p.shape[1], len(texts[0].guesses)
    n_tables = len(tables[0]) // len(texts)  # one a text, or one a guess
    result: list[list[_Continuation]] = []
    for place, text in enumerate(texts):
        own = [
            _Continuation(total, of + found // size, found % size, log)
            for of in range(n_tables)
            for total, found, log in zip(*(table[place * n_tables + of] for table in tables), strict=True)
            if total > NEVER
        ]
        if n_tables > 1 or text.terms.n_ids:
            rows = slice(place * width, (place + 1) * width)
            own = sorted(own + _wanted(text, own, log_p[rows], totals[rows]), key=lambda one: -one.total)
        result.append(own)
    return result


def _wanted(text: "_Text", known: list[_Continuation], log_p: Tensor, totals: Tensor) -> list[_Continuation]:
    """What the forced terms want next, where it is not among the likeliest."""
    have = {(one.of, one.id) for one in known}
    asked = [(of, number) for of, guess in enumerate(text.guesses) for number in sorted(text.wanted(guess.ids))]
    return [
        _Continuation(float(totals[of, number]), of, number, float(log_p[of, number]))
        for of, number in asked
        if (of, number) not in have and float(totals[of, number]) > NEVER
    ]


def _n_equal(texts: list[list[int]]) -> int:
    """How many ids all of them begin with: as many as the first and the last do, were they sorted."""
    first, last = min(texts), max(texts)
    return next((n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))


class _Text:
    """One text as it is searched: its running guesses, best first, and the finished ones, at most `n_beams`."""

    def __init__(self, limit: LengthLimit, beam: BeamConfig, stop_ids: frozenset[int], terms: TermConstraints) -> None:
        if terms.n_ids > limit.max_new_tokens:
            raise InputError(f"the forced terms are {terms.n_ids} tokens, the text may have {limit.max_new_tokens}")
        self.terms = terms
        self.guesses = [_Guess([], [], 0.0)]
        self._limit, self._beam, self._stop_ids = limit, beam, stop_ids
        self._finished: list[Hypothesis] = []
        self.common_prefix = 0
        """Ids that all guesses had in common before the latest step."""

    def forbidden(self, ids: list[int]) -> set[int]:
        """What a guess may not go on with: an end that comes too early, or the last of an n-gram it holds already."""
        found: set[int] = set()
        if len(ids) < self._beam.min_new_tokens:
            found |= self._stop_ids
        n = self._beam.no_repeat_ngram_size
        if n is not None and len(ids) >= n:
            tail = ids[len(ids) - n + 1 :]
            found |= {ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == tail}
        return found

    def wanted(self, ids: list[int]) -> set[int]:
        """What the terms want next; the end, once all of them are there."""
        if self.terms.n_ids == 0:
            return set()
        return self.terms.wanted(ids) or set(self._stop_ids)

    def advance(self, continued: list[_Continuation]) -> None:
        """Ends are finished where they are among the best; the best of the others are the new guesses."""
        n_beams, is_forced = self._beam.n_beams, self.terms.n_ids > 0
        self.common_prefix = _n_equal([guess.ids for guess in self.guesses])
        going: list[_Guess] = []
        for rank, one in enumerate(continued):
            before = self.guesses[one.of]
            guess = _Guess([*before.ids, one.id], [*before.log_p, one.log_p], one.total, one.of)
            if one.id not in self._stop_ids:
                going.append(guess)
                if len(going) == n_beams and not is_forced:
                    break  # ends that come later are not among the best
            elif (rank < n_beams or is_forced) and self._is_complete(guess):
                self._finish(guess, FinishReason.STOP)
        if is_forced:
            going = self._on_the_way(going)
        self.guesses = going[:n_beams]
        if self.guesses and len(self.guesses[0].ids) >= self._limit.n_new:
            for guess in filter(self._is_complete, self.guesses):
                self._finish(guess, self._limit.finish_reason)
            self.guesses = []
        if self.guesses:
            first = self.guesses[0]
            self.guesses += [_Guess(first.ids, [], NEVER, first.of)] * (n_beams - len(self.guesses))

    @property
    def is_done(self) -> bool:
        """Nothing runs any more, or all places are taken by better ones."""
        if not self.guesses:
            return True
        best = self.guesses[0]
        is_full = len(self._finished) == self._beam.n_beams
        return is_full and self._finished[-1].score >= self._score(best.total, len(best.ids))

    def best(self, number: int) -> list[Hypothesis]:
        if not self._finished:
            raise InputError(
                f"text {number}: nothing of at most {self._limit.n_new} tokens keeps to all that is asked "
                f"(forced terms of {self.terms.n_ids} tokens, min_new_tokens={self._beam.min_new_tokens}, "
                f"no_repeat_ngram_size={self._beam.no_repeat_ngram_size})"
            )
        return self._finished[: self._beam.n_best]

    def _on_the_way(self, guesses: list[_Guess]) -> list[_Guess]:
        """Those that can still reach all terms, spread over how far they have come."""
        reached = [(self.terms.n_reached(guess.ids), guess) for guess in guesses]
        n_left = self._limit.n_new - len(guesses[0].ids) if guesses else 0
        able = [(n, guess) for n, guess in reached if self.terms.n_ids - n <= n_left]
        return sorted(allocate_beams(able, self._beam.n_beams), key=lambda guess: -guess.total)

    def _is_complete(self, guess: _Guess) -> bool:
        return self.terms.n_ids == 0 or self.terms.n_reached(guess.ids) == self.terms.n_ids

    def _finish(self, guess: _Guess, finish_reason: FinishReason) -> None:
        score = self._score(sum(guess.log_p), len(guess.ids))
        self._finished.append(
            Hypothesis(ids=guess.ids, log_probabilities=guess.log_p, score=score, finish_reason=ended)
        )
        self._finished.sort(key=lambda one: -one.score)
        del self._finished[self._beam.n_beams :]

    def _score(self, total: float, n: int) -> float:
        return total / n**self._beam.length_penalty
