"""Runs of a model on a text, cached with their activations and recomputed after eviction."""

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
from qkv.serving.model_registry import ModelRegistry, RegisteredModel
from qkv.serving.model_summary import attention_stacks
from qkv.serving.responses import RequestError
from qkv.serving.schemas import EdgeMaskSpec, HeadAblationSpec, InterventionSpecs, PatchSpec, RunRequest
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator
from qkv.text import Tokenizer
from qkv.text.token_display import token_text_or_vocabulary_name

MAX_CACHE_BYTES = 2**28
"""Maximum total size of the cached activations in bytes. The newest run is kept regardless of its size."""
N_TOP_TOKENS, MAX_MASKS = 10, 16
MAX_REMEMBERED_REQUESTS = 1_000
"""Maximum number of requests that are remembered so that their runs can be recomputed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of running a model on a text, with any interventions applied."""

    id: str
    request: RunRequest
    loaded: RegisteredModel
    task: Task
    model_input: ModelInput
    cache: ActivationCache
    second: str | None
    milliseconds: float
    n_bytes: int

    @cached_property
    def error(self) -> float:
        """The value of max|A·V − output|, which is cached because computing it takes as long as the forward pass."""
        return self.cache.attention_reconstruction_error if self.cache.stacks else 0.0


@dataclass
class RunCache:
    """A cache of runs that evicts the least recently used run. The id of a run is a hash of its request."""

    registry: ModelRegistry
    max_bytes: int = MAX_CACHE_BYTES
    _runs: OrderedDict[str, Run] = field(default_factory=OrderedDict)
    _requests: OrderedDict[str, RunRequest] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def get_or_compute(self, request: RunRequest) -> Run:
        run_id = hashlib.sha256(json.dumps(request.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:20]
        with self._lock:
            cached = self._runs.get(run_id)
        if cached is not None:
            self.registry.get_or_load_task(cached.loaded)  # raises if the model was deleted in the meantime
            return self._store(cached)
        return self._store(self._compute(run_id, request))

    def find_or_recompute(self, run_id: str) -> Run:
        """Return the run with the given id, recomputing it if it was evicted."""
        with self._lock:
            request = self._requests.get(run_id)
        if request is None:
            raise RequestError(404, f"unknown run id {run_id!r}; send the request to /api/run again")
        return self.get_or_compute(request)

    def _store(self, run: Run) -> Run:
        with self._lock:
            # The request is stored only after the run has succeeded so that rejected texts, which may be long, are not
            # kept.
            self._requests[run.id] = run.request
            self._requests.move_to_end(run.id)
            if len(self._requests) > MAX_REMEMBERED_REQUESTS:
                self._requests.popitem(last=False)
            self._runs[run.id] = run
            self._runs.move_to_end(run.id)
            while len(self._runs) > 1 and sum(cached.n_bytes for cached in self._runs.values()) > self.max_bytes:
                self._runs.popitem(last=False)
        return run

    def _compute(self, run_id: str, request: RunRequest) -> Run:
        loaded = self.registry.find_or_register_checkpoint(request.model)
        task = self.registry.get_or_load_task(loaded)
        with loaded.lock:
            model_input, second = prepare_input_translating_if_needed(task, request.text, request.second)
            start = perf_counter()
            with apply_interventions(task.model, build_interventions(task, request.interventions)):
                cache = run_with_cache(task.model, model_input)
            milliseconds = 1000 * (perf_counter() - start)
        return Run(
            id=run_id,
            request=request,
            loaded=loaded,
            task=task,
            model_input=model_input,
            cache=cache,
            second=second,
            milliseconds=milliseconds,
            n_bytes=_count_cache_bytes(cache),
        )


def prepare_input_translating_if_needed(task: Task, text: str, second: str | None) -> tuple[ModelInput, str | None]:
    """Return the model input and the second text.

    For a translation model, the second text is the translation. If none is given, the model translates the text.
    """
    if not text.strip() and not isinstance(task, LanguageModel):
        raise InputError("the text has 0 words, at least 1 is required")
    if not isinstance(task, Translator):
        return prepare_input(task, text, second), second
    source_text = normalize_prefix_and_check_source(task, text)
    if second is not None:
        return prepare_input(task, source_text, second), second
    best = task.translate_batch([text], beam=BeamConfig(n_beams=5))[0].hypotheses[0]
    return prepare_input(task, source_text, best.ids), best.text


def normalize_prefix_and_check_source(task: Translator, text: str) -> str:
    """Return the source text as the translation model receives it. Raise an error if it is empty or too long."""
    if not (source_text := task.normalize_and_add_prefix(text)):
        raise InputError("the text has 0 words, at least 1 is required")
    check_context_length(task.model, len(task.source_tokenizer.encode(source_text)))
    return source_text


def build_interventions(task: Task, specs: InterventionSpecs) -> list[Intervention]:
    """Convert the interventions of a request to `qkv.inspection` interventions."""
    return [_build_intervention(task, spec) for spec in specs]


def _build_intervention(task: Task, spec: HeadAblationSpec | EdgeMaskSpec | PatchSpec) -> Intervention:
    match spec:
        case HeadAblationSpec():
            return HeadAblation(stack=spec.stack, layer=spec.layer, head=spec.head)
        case EdgeMaskSpec():
            return EdgeMask(stack=spec.stack, query=spec.query, key=spec.key, layer=spec.layer, head=spec.head)
        case PatchSpec():
            other, _ = prepare_input_translating_if_needed(task, spec.text, spec.second)
            return ActivationPatch(tap=spec.tap, other=other, positions=spec.positions)


def run_response(run: Run) -> dict[str, Any]:
    """Return the response of `/api/run`."""
    cache, task = run.cache, run.task
    predicts = None
    if cache.logits is not None:
        predicts = "next_token" if run.model_input.next_ids is not None else "this_token"
    source = run.model_input.source
    return {
        "run": run.id,
        "model": run.request.model,
        "text": run.request.text,
        "second": run.second,
        "sequence": tokens_to_json(run.model_input.sequence),
        "source": None if source is None else tokens_to_json(source),
        "stacks": [
            {
                **stack,
                "n_queries": len(cache.query_labels(stack["stack"])),
                "n_keys": len(cache.key_labels(stack["stack"])),
            }
            for stack in attention_stacks(task.model.config)
        ],
        "predicts": predicts,
        "predictions": [_predict_at(run, position) for position in _mask_or_last_positions(run)] if predicts else [],
        "classes": _class_probabilities_before_and_after(run),
        "effect": _intervention_effect_to_json(run) if run.request.interventions and predicts else None,
        "error": run.error,
        "milliseconds": run.milliseconds,
        "remarks": list(task.remarks),
    }


def tokens_to_json(tokens: TokenizedText) -> dict[str, Any]:
    return {
        "text": tokens.text,
        "ids": tokens.ids,
        "tokens": tokens.tokens,
        "labels": tokens.labels,
        "word_ids": tokens.word_ids,
        "is_special": tokens.is_special,
    }


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token with visible whitespace."""
    return mark_whitespace(token_text_or_vocabulary_name(tokenizer, token_id))


def _mask_or_last_positions(run: Run) -> list[int]:
    """Return the positions of the [MASK] tokens if the model is a BERT, or the last position otherwise."""
    ids = run.model_input.sequence.ids
    if not isinstance(run.task.model, BERT):
        return [len(ids) - 1]
    mask = run.task.tokenizer.find_special_id(SpecialToken.MASK)
    return [position for position, token_id in enumerate(ids) if token_id == mask][:MAX_MASKS]


def _predict_at(run: Run, position: int) -> dict[str, Any]:
    assert run.cache.logits is not None
    tokenizer = run.task.tokenizer
    p = run.cache.logits[position].float().softmax(-1)
    best = p[: tokenizer.vocab_size].topk(min(N_TOP_TOKENS, tokenizer.vocab_size))

    def to_json(token_id: int) -> dict[str, Any]:
        return {"id": token_id, "label": token_label(tokenizer, token_id), "probability": float(p[token_id])}

    next_ids = [] if run.model_input.next_ids is None else run.model_input.next_ids
    return {
        "position": position,
        "top_tokens": [to_json(token_id) for token_id in best.indices.tolist()],
        "target": to_json(next_ids[position]) if position < len(next_ids) else None,
    }


def _class_probabilities_before_and_after(run: Run) -> list[dict[str, Any]]:
    """Return the probability of each class without and with the interventions."""
    task = run.task
    if not isinstance(task, TextEncoder) or task.model.config.n_classes is None:
        return []
    text = run.request.text if run.request.second is None else (run.request.text, run.request.second)
    with run.loaded.lock:
        before = task.classify([text])[0].probabilities
        with apply_interventions(task.model, build_interventions(task, run.request.interventions)):
            after = task.classify([text])[0].probabilities
    return [{"label": name, "probability": p, "before": before[name]} for name, p in after.items()]


def _intervention_effect_to_json(run: Run) -> dict[str, Any]:
    masked_queries = [spec.query for spec in run.request.interventions if isinstance(spec, EdgeMaskSpec)]
    positions = _mask_or_last_positions(run) or masked_queries or [-1]
    task = run.task
    with run.loaded.lock:
        effect = measure_effect(
            task.model,
            task.tokenizer,
            run.model_input,
            build_interventions(task, run.request.interventions),
            position=positions[0],
            n=N_TOP_TOKENS,
        )
    target_ids = run.model_input.sequence.ids if run.model_input.next_ids is None else run.model_input.next_ids
    targets = zip(
        target_ids, effect.target_log_probs_before.tolist(), effect.target_log_probs_after.tolist(), strict=False
    )
    return {
        "position": effect.position,
        "top_tokens": [
            {"id": token_id, "label": token, "before": before, "after": after}
            for token_id, token, before, after in zip(
                effect.ids,
                effect.tokens,
                effect.log_probs_before.exp().tolist(),
                effect.log_probs_after.exp().tolist(),
                strict=True,
            )
        ],
        "targets": [
            {"position": position, "label": token_label(task.tokenizer, token_id), "before": before, "after": after}
            for position, (token_id, before, after) in enumerate(targets)
        ],
        "kl_divergence": effect.divergence.tolist(),
    }


def _count_cache_bytes(cache: ActivationCache) -> int:
    """Return the memory that the cached tensors occupy, in bytes.

    Each storage counts once and in full, even if the tensors use only part of it.
    """
    activations = cache.activations
    # Scores and weights do not count because they are recomputed from queries and keys on access.
    tensors = [activations.get_pass(name) for name in activations.names if not name.endswith((".scores", ".weights"))]
    if not isinstance(cache.model, RNNSeq2Seq):
        for stack in cache.stacks:
            for layer in range(cache.n_layers(stack)):
                for record in cache.attention_records(stack, layer):
                    inputs = record.inputs
                    tensors += [inputs.queries, inputs.keys, inputs.values, inputs.bias, record.head_outputs]
                    tensors += [record.changed_scores, record.changed_weights]
    storages = [tensor.untyped_storage() for tensor in (*tensors, cache.logits) if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
