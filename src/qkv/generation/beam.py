"""Beam search: the likeliest whole text, as far as a few running guesses can find it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.config import BeamConfig
from qkv.errors import WeightsError
from qkv.generation.decoder import Decoder, GPTDecoder
from qkv.generation.sampling import NextLogits
from qkv.generation.text import Ended, Limit, begin
from qkv.models import GPT

NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One whole text that the search found."""

    ids: list[int]
    """The new ones; an end token, where it came to one, is the last."""
    log_probabilities: list[float]
    score: float
    """Σ log p ÷ (number of new ids)^length_penalty."""
    ended: Ended


def beam_generate(
    model: GPT, prompts: Sequence[Sequence[int]], *, max_new: int, beam: BeamConfig, stop_ids: frozenset[int] = NO_STOPS
) -> list[list[Hypothesis]]:
    """The best `beam.n_best` texts after each prompt, best first; prompts have any lengths."""
    texts = begin(prompts, max_new=max_new, context_length=model.config.context_length)
    capacity = max(len(text.prompt) + text.limit.n_new - 1 for text in texts)
    with torch.inference_mode():
        decoder = GPTDecoder(model, batch=len(texts), capacity=capacity)
        logits = decoder.prefill(prompts)
    return beam_search(decoder, logits, [text.limit for text in texts], beam=beam, stop_ids=stop_ids)


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    logits: NextLogits,
    limits: Sequence[Limit],
    *,
    beam: BeamConfig,
    stop_ids: frozenset[int] = NO_STOPS,
) -> list[list[Hypothesis]]:
    """For any decoder that stands at the beginning of as many texts as there are limits.

    Each step keeps the `n_beams` likeliest of all one-token continuations. One that ends leaves the beam and
    is kept as finished. A text is done when it has `n_beams` finished ones and no running one scores better,
    as it stands, than the worst of them.
    """
    n_texts, n_beams = len(limits), beam.n_beams
    finished = [_Finished(beam) for _ in limits]
    texts = list(range(n_texts))
    beams = _Beams.start(n_texts, n_beams, like=logits)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=logits.device)
    first = torch.arange(n_texts, device=logits.device).repeat_interleave(n_beams)
    decoder.select(first)
    logits = logits[first]
    while True:
        best = _best_continuations(beams, logits, n=n_beams * (1 + len(stops)))
        is_stop = torch.isin(best.ids, stops)
        for place, rank in (is_stop[:, :n_beams] & best.sums[:, :n_beams].isfinite()).nonzero().tolist():
            finished[texts[place]].add(*best.hypothesis(beams, place, rank), ended=Ended.STOP)
        beams, rows = beams.extended(best, is_stop)
        going = []
        for place, text in enumerate(texts):
            if beams.n_new >= limits[text].n_new:
                beams.finish(place, finished[text], limits[text].ended)
            elif not finished[text].is_done(float(beams.sums[place, 0]), beams.n_new):
                going.append(place)
        if not going:
            return [one.best() for one in finished]
        _go_on(decoder, rows.view(-1, n_beams), going)
        if len(going) < len(texts):
            texts, beams = [texts[place] for place in going], beams.of(going)
        logits = decoder.step(beams.ids[:, :, -1].flatten())


def _go_on(decoder: Decoder, rows: Int[Tensor, "text beam"], going: list[int]) -> None:
    if len(going) < len(rows):
        kept = torch.tensor(going, device=rows.device)
        decoder.select(rows[kept].flatten(), texts=kept)
    elif rows.flatten().tolist() != list(range(rows.numel())):
        decoder.select(rows.flatten())


@dataclass(frozen=True)
class _Best:
    """The best one-token continuations of each text, best first."""

    sums: Float[Tensor, "text rank"]
    beams: Int[Tensor, "text rank"]
    ids: Int[Tensor, "text rank"]
    log_p: Float[Tensor, "text rank"]

    def hypothesis(self, beams: "_Beams", place: int, rank: int) -> tuple[list[int], list[float]]:
        of = int(self.beams[place, rank])
        ids = [*beams.ids[place, of].tolist(), int(self.ids[place, rank])]
        return ids, [*beams.log_p[place, of].tolist(), float(self.log_p[place, rank])]


@dataclass(frozen=True)
class _Beams:
    """The running guesses of each text, best first; a guess of sum −∞ only fills a place."""

    ids: Int[Tensor, "text beam new"]
    log_p: Float[Tensor, "text beam new"]
    sums: Float[Tensor, "text beam"]

    @classmethod
    def start(cls, n_texts: int, n_beams: int, *, like: NextLogits) -> "_Beams":
        """Nothing said yet: all guesses are the same, so one alone counts."""
        wide = torch.promote_types(like.dtype, torch.float32)
        sums = torch.full((n_texts, n_beams), float("-inf"), dtype=wide, device=like.device)
        sums[:, 0] = 0.0
        empty = sums.new_empty(n_texts, n_beams, 0)
        return cls(empty.long(), empty, sums)

    @property
    def n_new(self) -> int:
        return self.ids.shape[2]

    def extended(self, best: _Best, is_stop: Tensor) -> tuple["_Beams", Int[Tensor, " row"]]:
        """The likeliest continuations that do not end, and the rows they continue."""
        n_texts, n_beams = self.sums.shape
        sums, ranks = best.sums.masked_fill(is_stop, float("-inf")).topk(n_beams)
        of, ids, log_p = (part.gather(1, ranks) for part in (best.beams, best.ids, best.log_p))
        texts = torch.arange(n_texts, device=of.device)[:, None]
        extended = _Beams(
            torch.cat((self.ids[texts, of], ids[..., None]), dim=2),
            torch.cat((self.log_p[texts, of], log_p[..., None]), dim=2),
            sums,
        )
        return extended, (texts * n_beams + of).flatten()

    def of(self, places: list[int]) -> "_Beams":
        return _Beams(self.ids[places], self.log_p[places], self.sums[places])

    def finish(self, place: int, finished: "_Finished", ended: Ended) -> None:
        for i, total in enumerate(self.sums[place].tolist()):
            if total > float("-inf"):
                finished.add(self.ids[place, i].tolist(), self.log_p[place, i].tolist(), ended=ended)


def _best_continuations(beams: _Beams, logits: NextLogits, *, n: int) -> _Best:
    n_texts, n_beams = beams.sums.shape
    log_p = logits.to(beams.sums.dtype).log_softmax(-1).view(n_texts, n_beams, -1)
    totals = (beams.sums[..., None] + log_p).flatten(1)
    sums, found = totals.topk(min(n, totals.shape[1]))
    if bool(sums.isnan().any()):
        raise WeightsError(f"after {beams.n_new} new tokens the logits are no numbers (NaN)")
    size = logits.shape[-1]
    return _Best(sums, found // size, found % size, log_p.flatten(1).gather(1, found))


class _Finished:
    """The best finished texts after one prompt, at most `n_beams`."""

    def __init__(self, beam: BeamConfig) -> None:
        self._beam = beam
        self._found: list[Hypothesis] = []

    def add(self, ids: list[int], log_p: list[float], *, ended: Ended) -> None:
        score = self._score(sum(log_p), len(ids))
        self._found.append(Hypothesis(ids=ids, log_probabilities=log_p, score=score, ended=ended))
        self._found.sort(key=lambda one: -one.score)
        del self._found[self._beam.n_beams :]

    def is_done(self, best_running: float, n_new: int) -> bool:
        """Nothing runs any more, or all places are taken by better ones."""
        if best_running == float("-inf"):
            return True
        is_full = len(self._found) == self._beam.n_beams
        return is_full and self._found[-1].score >= self._score(best_running, n_new)

    def best(self) -> list[Hypothesis]:
        return self._found[: self._beam.n_best]

    def _score(self, total: float, n: int) -> float:
        return total / n**self._beam.length_penalty
