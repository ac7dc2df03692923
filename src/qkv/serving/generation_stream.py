"""Stream generated text with the candidates, the attention row, the KV cache size and the cost of every step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import BackendName
from qkv.config import SamplingConfig
from qkv.cost import DeviceType, Mode, Precision, Workload
from qkv.cost.calibration import Calibration, find_newest_calibration
from qkv.cost.devices import find_device, roofline_bound
from qkv.cost.estimate import estimate_workload
from qkv.cost.prediction import predict_time
from qkv.errors import AttentionEdgeNotReachedError, InputError
from qkv.generation import (
    GeneratedSequence,
    GenerationStep,
    GPTDecodeEngine,
    decode_steps,
    new_sequences,
    top_raw_and_processed_candidates,
)
from qkv.generation.decode_engine import CACHE_CHUNK, TokenLists
from qkv.inspection import Intervention, apply_interventions, match_taps, prepare_gpt_input_from_ids
from qkv.inspection.record import select_queries
from qkv.inspection.validation import check_index
from qkv.nn import AttentionInputs
from qkv.serving.model_registry import RegisteredModel
from qkv.serving.run_cache import build_interventions, token_label, tokens_to_json
from qkv.serving.schemas import GenerateRequest, PatchSpec
from qkv.tasks import LanguageModel, Task
from qkv.text import StreamingDecoder
from qkv.utils import gpu_name_or_cpu_threads


@dataclass(frozen=True)
class _ForwardPass:
    """The attention weights and the measurements of one forward pass."""

    last_query_attention: Float[Tensor, "layer head key"]
    n_computed: int
    milliseconds: float


@dataclass
class _AttentionRecordingEngine:
    """A decode engine for one sequence that records the attention and the time of every forward pass of a GPT.

    For each forward pass, the engine acquires the model's lock and applies the interventions. Between forward passes,
    the lock is released so that other requests do not have to wait for the whole text.
    """

    task: LanguageModel
    loaded: RegisteredModel
    interventions: Sequence[Intervention]
    engine: GPTDecodeEngine | None
    """Eager engine with a KV cache. If it is `None`, every step processes the whole sequence."""
    calibration: Calibration | None = None
    ids: list[int] = field(default_factory=list)
    last: _ForwardPass | None = None
    unreached: list[str] = field(default_factory=list)
    """Messages about interventions whose tokens were not part of a forward pass, one message for each such pass."""

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> Tensor:
        (prompt,) = prompts
        self.ids = list(prompt)
        if self.engine is None:
            return self._recompute_last_logits()
        with self._intervene_and_record_last_query(len(prompt)):
            return self.engine.prefill(prompts, sources=sources)

    def decode(self, ids: Tensor) -> Tensor:
        self.ids += ids.tolist()
        if self.engine is None:
            return self._recompute_last_logits()
        with self._intervene_and_record_last_query(1):
            return self.engine.decode(ids)

    def reorder(self, rows: Tensor, *, sequences: Tensor | None = None, common_prefix: int = 0) -> None:
        """Do nothing because there is only one row."""

    def close(self) -> None:
        """Do nothing because the cache is not reused."""

    def _recompute_last_logits(self) -> Tensor:
        model = self.task.model
        with self._intervene_and_record_last_query(len(self.ids)):
            states = model.hidden_states(torch.tensor([self.ids], device=model.embedding.token.weight.device))
            return model.unembedding(states[:, -1:])[:, 0]

    @contextmanager
    def _intervene_and_record_last_query(self, n_computed: int) -> Iterator[None]:
        layers: list[AttentionInputs] = []
        with self.loaded.lock, torch.inference_mode(), ExitStack() as stack:
            for tap in match_taps(self.task.model, "blocks.*.attention.inputs").values():
                stack.callback(tap.observe(layers.append))
            start = perf_counter()
            try:
                with apply_interventions(self.task.model, self.interventions):
                    yield
            except AttentionEdgeNotReachedError as error:
                # The tokens of a masked edge may be part of another forward pass, or of none.
                self.unreached.append(str(error))
            milliseconds = 1000 * (perf_counter() - start)
            # The next token is chosen from the logits of the last query.
            rows = [
                select_queries(inputs, torch.tensor([inputs.queries.shape[-2] - 1])).weights()[0, :, 0]
                for inputs in layers
            ]
        self.last = _ForwardPass(torch.stack(rows).float(), n_computed, milliseconds)

    @property
    def cached_tokens_and_bytes(self) -> tuple[int, int]:
        """The number of tokens in the KV cache and the number of bytes that they occupy."""
        if self.engine is None:
            return 0, 0
        cache = self.engine.cache
        bytes_per_token = sum(part[:, :, :1].nbytes for layer in cache.layers for part in (layer.keys, layer.values))
        return cache.n_filled, cache.n_filled * bytes_per_token


def stream_generation(loaded: RegisteredModel, task: Task, request: GenerateRequest) -> Iterator[dict[str, Any]]:
    """Yield the frames of the response of `/api/generate`. Generation stops when the iterator is no longer advanced."""
    if not isinstance(task, LanguageModel) or not task.model.config.causal:
        raise InputError(f"{loaded.id}: streaming text generation requires a GPT")
    if any(isinstance(spec, PatchSpec) for spec in request.interventions):
        raise InputError("interventions during generation must be head ablations or masked edges, got a patch")
    prompt = list(request.ids) if request.ids is not None else task.tokenize(request.text or "")
    vocab_size = task.model.config.vocab_size
    for token_id in prompt:
        check_index("id", token_id, vocab_size, unit="ids of the vocabulary")
    with loaded.lock:
        interventions = build_interventions(task, request.interventions)
        model_input = prepare_gpt_input_from_ids(task, prompt)
    config, sampling = task.model.config, request.sampling
    (sequence,) = new_sequences([prompt], max_new=request.max_new, context_length=config.context_length)
    engine = None
    if request.use_cache:
        capacity = len(prompt) + sequence.limit.max_new_tokens - 1
        engine = GPTDecodeEngine(task.model, task.model.new_cache(batch=1, capacity=capacity, growth_step=CACHE_CHUNK))
    calibration = find_newest_calibration(
        config, Mode.DECODE, Precision.FLOAT32, device=gpu_name_or_cpu_threads(torch.device("cpu"))
    )
    observed = _AttentionRecordingEngine(task, loaded, interventions, engine, calibration)
    values_per_token = config.n_layers * config.n_kv_heads * (config.d_head + config.d_value)
    yield {
        "kind": "start",
        "prompt": tokens_to_json(model_input.sequence),
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "d_head": config.d_head,
        "d_value": config.d_value,
        "bytes_per_token": values_per_token * task.model.embedding.token.weight.element_size(),
        "context_length": config.context_length,
    }
    start = perf_counter()
    logits = observed.prefill([prompt])
    text_decoder = StreamingDecoder(task.tokenizer, context_ids=prompt)
    text = ""
    for step in decode_steps(observed, logits, [sequence], sampling=sampling, stop_ids=task.stop_ids):
        # Models with a padded vocabulary can produce ids that do not exist in the tokenizer.
        new_text = text_decoder.add(step.id) if step.id < task.tokenizer.vocab_size else ""
        if sequence.finish_reason is not None:
            new_text += text_decoder.finish()
        text += new_text
        yield _step_frame(task, observed, step, sampling, n_candidates=request.candidates) | {"text": new_text}
    yield _final_frame(sequence, text, observed, milliseconds=1000 * (perf_counter() - start))


def _final_frame(
    sequence: GeneratedSequence, text: str, observed: _AttentionRecordingEngine, *, milliseconds: float
) -> dict[str, Any]:
    n_passes = len(sequence.new_ids)
    never_reached = {message for message in observed.unreached if observed.unreached.count(message) == n_passes}
    return {
        "kind": "end",
        "finish_reason": sequence.finish_reason,
        "text": text,
        "ids": sequence.new_ids,
        "milliseconds": milliseconds,
        "remarks": sorted(never_reached),
    }


def _step_frame(
    task: LanguageModel,
    observed: _AttentionRecordingEngine,
    step: GenerationStep,
    sampling: SamplingConfig,
    *,
    n_candidates: int,
) -> dict[str, Any]:
    assert observed.last is not None
    forward, index = observed.last, len(step.sequence.new_ids) - 1
    position = len(step.sequence.prompt) + index - 1
    n_cached, n_bytes = observed.cached_tokens_and_bytes
    candidates = [
        {
            "id": candidate.id,
            "label": token_label(task.tokenizer, candidate.id),
            "probability": candidate.probability,
            "sampling_probability": candidate.revised,
            "is_chosen": candidate.is_chosen,
        }
        for candidate in top_raw_and_processed_candidates(step, sampling, n=n_candidates)
    ]
    mode = Mode.DECODE if forward.n_computed == 1 and observed.engine is not None else Mode.PREFILL
    return {
        "kind": "step",
        "index": index,
        "position": position,
        "id": step.id,
        "label": token_label(task.tokenizer, step.id),
        "probability": next(candidate["probability"] for candidate in candidates if candidate["is_chosen"]),
        "candidates": candidates,
        "attention": forward.last_query_attention,
        "n_computed": forward.n_computed,
        "n_cached": n_cached,
        "cache_bytes": n_bytes,
        **_estimate_step_cost(observed, mode, position + 1),
        "measured_ms": forward.milliseconds,
    }


def _estimate_step_cost(observed: _AttentionRecordingEngine, mode: Mode, seq_len: int) -> dict[str, Any]:
    """Estimate the cost of a forward pass that computes only the logits of the last token."""
    work = Workload(mode=mode, batch_size=1, seq_len=seq_len, logits_to_keep=1, device_type=DeviceType.CPU)
    config = observed.task.model.config
    estimate = estimate_workload(config, work)
    calibration = observed.calibration
    predicted_ms = None
    if calibration is not None:
        # Attention is recorded with the eager backend.
        predicted_ms = 1000 * predict_time(config, work, calibration, backend=BackendName.EAGER).seconds
    return {
        "flops": estimate.flops.forward,
        "bytes": estimate.traffic.forward_fused,
        "predicted_ms": predicted_ms,
        "bound_ms": 1000 * roofline_bound(estimate, find_device("cpu")).seconds,
    }
