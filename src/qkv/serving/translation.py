"""A translation with all that led to it: the guesses that ran, what was found, which word came from which."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qkv.choices import AlignmentAveraging
from qkv.config import BeamConfig
from qkv.errors import InputError
from qkv.generation import Decoder, FinishReason, LengthLimit, beam_search, encode_sources
from qkv.generation.translate import initial_logits
from qkv.inspection.alignment import CrossAttention
from qkv.inspection.model_input import mark_whitespace, prepare_input
from qkv.models import RNNSeq2Seq
from qkv.serving.schemas import AskTranslate
from qkv.serving.run_cache import named, side, source_of
from qkv.serving.model_registry import Open
from qkv.tasks import Task, Translator


class _Told:
    """A decoder that remembers which guesses it was told to go on with."""

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner
        self._parents: list[int] | None = None
        self._totals: list[float] = []
        self._log_p: Tensor | None = None
        self.steps: list[list[tuple[int, int, float]]] = []
        """Of each step, best first: id, its parent among the guesses before, Σ log p."""

    def reorder(self, rows: Tensor, *, sequences: Tensor | None = None, common_prefix: int = 0) -> None:  # noqa: ARG002
        """`common_prefix` only spares work."""
        self._parents = rows.tolist()
        self._inner.reorder(rows, sequences=sequences)

    def step(self, ids: Tensor) -> Tensor:
        numbers = ids.tolist()
        if self._log_p is not None:
            parents = self._parents or list(range(len(numbers)))
            totals = [self._totals[of] + float(self._log_p[of, i]) for of, i in zip(parents, numbers, strict=True)]
            found = {(i, of): total for i, of, total in zip(numbers, parents, totals, strict=True)}
            # Rows that only fill the batch repeat the first guess; a dict has each once.
            self.steps.append([(i, of, total) for (i, of), total in found.items()])
            self._totals = totals
        else:
            self._totals = [0.0] * len(numbers)
        self._parents = None
        logits = self._inner.step(ids)
        self._log_p = logits.float().log_softmax(-1)
        return logits


def translate(one: Open, task: Task, asked: AskTranslate) -> dict[str, Any]:
    if not isinstance(task, Translator):
        raise InputError(f"{one.id}: is no translator")
    given = source_of(task, asked.text)
    beam = BeamConfig(n_beams=asked.beam, n_best=asked.beam, length_penalty=asked.length_penalty)
    model = task.model
    looks = not (isinstance(model, RNNSeq2Seq) and model.decoder.attention is None)
    begun = perf_counter()
    with one.lock:
        found = task.translate_batch([asked.text], beam=beam, max_new=asked.max_new, attention=looks)[0]
        milliseconds = 1000 * (perf_counter() - begun)
        steps = _steps(task, found.source_ids, beam, asked.max_new)
    source = prepare_input(task, given, found.hypotheses[0].ids).source
    assert source is not None
    written = [
        {"text": one.text, "ids": one.ids, "labels": [mark_whitespace(token) for token in one.tokens],
         "log_probabilities": one.log_probabilities, "score": one.score, "finish_reason": one.finish_reason}
        for one in found.hypotheses
    ]  # fmt: skip
    return {
        "source": side(source),
        "found": written,
        "alignment": None if found.attention is None else _alignment(found.attention),
        "steps": [
            [{"id": i, "label": named(task.tokenizer, i), "parent": of, "total": total} for i, of, total in guesses]
            for guesses in steps
        ],
        "milliseconds": milliseconds,
    }  # fmt: skip


def _steps(
    task: Translator, source: list[int], beam: BeamConfig, max_new: int | None
) -> list[list[tuple[int, int, float]]]:
    """The same search once more, told of."""
    room = task.model.config.context_length
    n_new = min(max_new or 2 * len(source) + 10, room)
    with torch.inference_mode():
        decoder = _Told(encode_sources(task.model, [source], capacity=n_new))
        begun = torch.tensor([task.decoder_start_id], device=next(task.model.parameters()).device)
        logits, never = initial_logits(decoder, begun, forced_bos_id=task.decoding.forced_bos_id), task.decoding.suppressed_ids
        beam_search(decoder, logits, [LengthLimit(n_new, FinishReason.LENGTH)], beam=beam, stop_ids=task.stop_ids, suppressed_ids=never)
    return decoder.steps


def _alignment(found: CrossAttention) -> dict[str, Any]:
    return {
        "weights": found.average(AlignmentAveraging.ALL), "best": found.average(), "best_layer": found.best_layer,
        "words": [list(pair) for pair in found.word_pairs()], "pharaoh": found.to_pharaoh(),
        "source_words": found.source_words, "target_words": found.target_words,
    }  # fmt: skip
