"""What a model did with a text: seen once, kept while there is room, seen again when it was let go."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import Any

from qkv.choices import SpecialToken
from qkv.config import BeamConfig
from qkv.errors import InputError
from qkv.inspection import (
    ActivationCache,
    ActivationPatch,
    EdgeMask,
    HeadAblation,
    Intervention,
    ModelInput,
    apply_interventions,
    measure_effect,
    prepare_input,
    run_with_cache,
)
from qkv.inspection.model_input import TokenizedText, check_context_length, mark_whitespace
from qkv.models import BERT, RNNSeq2Seq
from qkv.serving.responses import RefusedError
from qkv.serving.schemas import AskRun, EdgeAsked, HeadAsked, Interventions, PatchAsked
from qkv.serving.model_summary import block_stacks
from qkv.serving.model_registry import ModelRegistry, Open
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator
from qkv.text import Tokenizer
from qkv.text.token_display import token_text

MOST_BYTES = 2**28
"""Of all traces that are kept; the newest is kept whatever its size."""
N_GUESSES, MOST_MASKS = 10, 16
MOST_KNOWN = 1_000
"""Runs whose request is remembered, so that they can be made again."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One text, one model, under interventions."""

    id: str
    asked: AskRun
    open: Open
    task: Task
    reading: ModelInput
    seen: ActivationCache
    second: str | None
    milliseconds: float
    n_bytes: int

    @cached_property
    def error(self) -> float:
        """max|A·V − output|; as dear as the pass itself, so it is computed once."""
        return self.seen.error if self.seen.stacks else 0.0


@dataclass
class Runs:
    """Runs by id; an id is a digest of what was asked."""

    shelf: ModelRegistry
    most_bytes: int = MOST_BYTES
    _kept: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    _known: OrderedDict[str, AskRun] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def ask(self, asked: AskRun) -> Run:
        run_id = hashlib.sha256(json.dumps(asked.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:20]
        with self._lock:
            known = self._kept.get(run_id)
        if known is not None:
            self.shelf.task(known.open)  # a model that was removed is told of, not remembered
            return self._keep(known)
        return self._keep(self._see(run_id, asked))

    def find(self, run_id: str) -> Run:
        with self._lock:
            asked = self._known.get(run_id)
        if asked is None:
            raise RefusedError(404, f"no run is known by the id {run_id!r}: post it to /api/run again")
        return self.ask(asked)

    def _keep(self, run: Run) -> Run:
        with self._lock:
            # Only now: a text that was refused, however long, is not remembered.
            self._known[run.id] = run.asked
            self._known.move_to_end(run.id)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            self._kept[run.id] = run
            self._kept.move_to_end(run.id)
            while len(self._kept) > 1 and sum(one.n_bytes for one in self._kept.values()) > self.most_bytes:
                self._kept.popitem(last=False)
        return run

    def _see(self, run_id: str, asked: AskRun) -> Run:
        one = self.shelf.find(asked.model)
        task = self.shelf.task(one)
        with one.lock:
            reading, second = read_text(task, asked.text, asked.second)
            begun = perf_counter()
            with apply_interventions(task.model, wanted(task, asked.interventions)):
                seen = run_with_cache(task.model, reading)
            milliseconds = 1000 * (perf_counter() - begun)
        return Run(
            id=run_id, asked=asked, open=one, task=task, reading=reading, seen=seen, second=second,
            milliseconds=milliseconds, n_bytes=_n_bytes(seen),
        )  # fmt: skip


def read_text(task: Task, text: str, second: str | None) -> tuple[ModelInput, str | None]:
    """What the model is given; a translator without a translation makes its own."""
    if not text.strip() and not isinstance(task, LanguageModel):
        raise InputError("the text is empty: 0 words, there must be at least 1")
    if not isinstance(task, Translator):
        return prepare_input(task, text, second), second
    given = source_of(task, text)
    if second is not None:
        return prepare_input(task, given, second), second
    best = task.translate_batch([text], beam=BeamConfig(n_beams=5))[0].hypotheses[0]
    return prepare_input(task, given, best.ids), best.text


def source_of(task: Translator, text: str) -> str:
    """What a translator is given of a text, which must be something and fit."""
    if not (given := task.prepare_source(text)):
        raise InputError("the text has 0 words, there must be at least 1")
    check_context_length(task.model, len(task.source_tokenizer.encode(given)))
    return given


def wanted(task: Task, asked: Interventions) -> list[Intervention]:
    return [_intervention(task, one) for one in asked]


def _intervention(task: Task, one: HeadAsked | EdgeAsked | PatchAsked) -> Intervention:
    match one:
        case HeadAsked():
            return HeadAblation(stack=one.stack, layer=one.layer, head=one.head)
        case EdgeAsked():
            return EdgeMask(stack=one.stack, query=one.query, key=one.key, layer=one.layer, head=one.head)
        case PatchAsked():
            return ActivationPatch(tap=one.tap, other=read_text(task, one.text, one.second)[0], positions=one.positions)


def told(run: Run) -> dict[str, Any]:
    """What `/api/run` answers."""
    seen, task = run.seen, run.task
    says = None if seen.logits is None else "next" if run.reading.next_ids is not None else "here"
    return {
        "run": run.id, "model": run.asked.model, "text": run.asked.text, "second": run.second,
        "own": side(run.reading.sequence), "source": None if run.reading.source is None else side(run.reading.source),
        "stacks": [
            {**one, "queries": len(seen.query_labels(one["stack"])), "keys": len(seen.key_labels(one["stack"]))}
            for one in block_stacks(task.model.config)
        ],
        "says": says,
        "predictions": [_prediction(run, at) for at in _asked_places(run)] if says else [],
        "classes": _classes(run),
        "effect": _effect(run) if run.asked.interventions and says else None,
        "error": run.error,
        "milliseconds": run.milliseconds,
        "remarks": list(task.remarks),
    }  # fmt: skip


def side(tokens: TokenizedText) -> dict[str, Any]:
    return {
        "text": tokens.text, "ids": tokens.ids, "tokens": tokens.tokens, "labels": tokens.labels,
        "words": tokens.word_ids, "is_special": tokens.is_special,
    }  # fmt: skip


def named(tokenizer: Tokenizer, number: int) -> str:
    return mark_whitespace(token_text(tokenizer, number))


def _asked_places(run: Run) -> list[int]:
    ids = run.reading.sequence.ids
    if not isinstance(run.task.model, BERT):
        return [len(ids) - 1]
    mask = run.task.tokenizer.find_special_id(SpecialToken.MASK)
    return [at for at, number in enumerate(ids) if number == mask][:MOST_MASKS]


def _prediction(run: Run, at: int) -> dict[str, Any]:
    assert run.seen.logits is not None
    tokenizer = run.task.tokenizer
    p = run.seen.logits[at].float().softmax(-1)
    best = p[: tokenizer.vocab_size].topk(min(N_GUESSES, tokenizer.vocab_size))

    def guess(number: int) -> dict[str, Any]:
        return {"id": number, "label": named(tokenizer, number), "probability": float(p[number])}

    came = [] if run.reading.next_ids is None else run.reading.next_ids
    return {
        "position": at, "guesses": [guess(number) for number in best.indices.tolist()],
        "wanted": guess(came[at]) if at < len(came) else None,
    }  # fmt: skip


def _classes(run: Run) -> list[dict[str, Any]]:
    task = run.task
    if not isinstance(task, TextEncoder) or task.model.config.n_classes is None:
        return []
    text = run.asked.text if run.asked.second is None else (run.asked.text, run.asked.second)
    with run.open.lock:
        before = task.classify([text])[0].probabilities
        with apply_interventions(task.model, wanted(task, run.asked.interventions)):
            after = task.classify([text])[0].probabilities
    return [{"label": name, "probability": p, "before": before[name]} for name, p in after.items()]


def _effect(run: Run) -> dict[str, Any]:
    cut = [one.query for one in run.asked.interventions if isinstance(one, EdgeAsked)]
    places = _asked_places(run) or cut or [-1]
    task = run.task
    with run.open.lock:
        found = measure_effect(
            task.model, task.tokenizer, run.reading, wanted(task, run.asked.interventions), position=places[0],
            n=N_GUESSES,
        )  # fmt: skip
    came = run.reading.sequence.ids if run.reading.next_ids is None else run.reading.next_ids
    both = zip(came, found.target_before.tolist(), found.target_after.tolist(), strict=False)
    return {
        "position": found.position,
        "guesses": [
            {"id": number, "label": token, "before": before, "after": after}
            for number, token, before, after in zip(
                found.ids, found.tokens, found.before.exp().tolist(), found.after.exp().tolist(), strict=True
            )
        ],
        "wanted": [
            {"position": at, "label": named(task.tokenizer, number), "before": before, "after": after}
            for at, (number, before, after) in enumerate(both)
        ],
        "divergence": found.divergence.tolist(),
    }


def _n_bytes(seen: ActivationCache) -> int:
    """What is really held: each storage whole and once, however little of it a kept view shows."""
    trace = seen.activations
    kept = [trace.at(name) for name in trace.names if not name.endswith((".scores", ".weights"))]
    if not isinstance(seen.model, RNNSeq2Seq):
        for stack in seen.stacks:
            for layer in range(seen.n_layers(stack)):
                for look in seen.attention_records(stack, layer):
                    own = look.lookup
                    kept += [own.queries, own.keys, own.values, own.bias, look.heads]
                    kept += [look.changed_scores, look.changed_weights]
    storages = [one.untyped_storage() for one in (*kept, seen.logits) if one is not None]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
