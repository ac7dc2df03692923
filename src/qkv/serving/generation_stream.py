"""A text as it is written, step by step: what was chosen from, the new row of attention, the cache, the cost."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.cost import DeviceType, Mode, Precision, Workload
from qkv.cost.calibration import Calibration, find_calibration
from qkv.cost.devices import find_device
from qkv.cost.estimate import estimate_workload
from qkv.cost.prediction import predict_time
from qkv.cost.roofline import roofline_bound
from qkv.errors import InputError, TapError
from qkv.generation import GeneratedSequence, GenerationStep, GPTDecoder, decode_steps, new_sequences, top_candidates
from qkv.inspection import Intervention, apply_interventions, match_taps, prepare_input_ids
from qkv.inspection.validation import check_index
from qkv.nn import AttentionInputs
from qkv.serving.schemas import AskGenerate, PatchAsked
from qkv.serving.run_cache import named, side, wanted
from qkv.serving.model_registry import Open
from qkv.tasks import LanguageModel, Task
from qkv.text import StreamingDecoder
from qkv.training.device_calibration import device_name


@dataclass(frozen=True)
class _Pass:
    """What one pass of the model did."""

    rows: Float[Tensor, "layer head key"]
    """Of the last query."""
    n_computed: int
    milliseconds: float


@dataclass
class _Watched:
    """A GPT in the midst of one text, with or without a cache; the lock is held for a pass alone.

    So that other requests need not wait for the whole text, interventions too are put in place for each pass.
    """

    task: LanguageModel
    open: Open
    interventions: Sequence[Intervention]
    decoder: GPTDecoder | None
    """None: no cache, the whole text is read at each step."""
    calibration: Calibration | None = None
    ids: list[int] = field(default_factory=list)
    last: _Pass | None = None
    unreached: list[str] = field(default_factory=list)

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        self.ids = list(prompt)
        if self.decoder is None:
            return self._whole()
        decoder = self.decoder
        with self._pass(len(prompt)):
            return decoder.prefill([list(prompt)])

    def step(self, ids: Tensor) -> Tensor:
        self.ids += ids.tolist()
        if self.decoder is None:
            return self._whole()
        with self._pass(1):
            return self.decoder.step(ids)

    def reorder(self, rows: Tensor, *, sequences: Tensor | None = None, common_prefix: int = 0) -> None:
        """There is one row, which goes on or ends."""

    def _whole(self) -> Tensor:
        model = self.task.model
        with self._pass(len(self.ids)):
            states = model.states(torch.tensor([self.ids], device=model.embedding.token.weight.device))
            return model.unembedding(states[:, -1:])[:, 0]

    @contextmanager
    def _pass(self, n: int) -> Iterator[None]:
        looks: list[AttentionInputs] = []
        with self.open.lock, torch.inference_mode(), ExitStack() as stack:
            for tap in match_taps(self.task.model, "blocks.*.attention.inputs").values():
                stack.callback(tap.observe(looks.append))
            begun = perf_counter()
            try:
                with apply_interventions(self.task.model, self.interventions):
                    yield
            except TapError as error:
                # The tokens that an edge lies between may come in another pass, or not at all.
                if "never reached" not in str(error):
                    raise
                self.unreached.append(str(error))
            milliseconds = 1000 * (perf_counter() - begun)
            # Of one text the last query is the one that chooses.
            rows = [look.select_queries(torch.tensor([look.queries.shape[-2] - 1])).weights()[0, :, 0] for look in looks]
        self.last = _Pass(torch.stack(rows).float(), n, milliseconds)

    @property
    def cache_size(self) -> tuple[int, int]:
        """Tokens in the cache, and the bytes that they really take there."""
        if self.decoder is None:
            return 0, 0
        kept = self.decoder.cache
        a_token = sum(part[:, :, :1].nbytes for layer in kept.layers for part in (layer.keys, layer.values))
        return kept.n_filled, kept.n_filled * a_token


def generate(one: Open, task: Task, asked: AskGenerate) -> Iterator[dict[str, Any]]:
    """The frames of `/api/generate`; whoever stops reading stops the work."""
    if not isinstance(task, LanguageModel) or not task.model.config.causal:
        raise InputError(f"{one.id}: does not write text token by token; that is asked of a GPT")
    if any(isinstance(change, PatchAsked) for change in asked.interventions):
        raise InputError("a patch is of one text; while another is written, switch heads off or cut edges")
    prompt = list(asked.ids) if asked.ids is not None else task.encode(asked.text or "")
    n_known = task.model.config.vocab_size
    for number in prompt:
        check_index("id", number, n_known, of="ids of the vocabulary")
    with one.lock:
        changes = wanted(task, asked.interventions)
        reading = prepare_input_ids(task, prompt)
    config, sampling = task.model.config, asked.sampling
    (text,) = new_sequences([prompt], max_new=asked.max_new, context_length=config.context_length)
    decoder = None
    if asked.cache:
        decoder = GPTDecoder(task.model, batch=1, capacity=len(prompt) + text.limit.max_new_tokens - 1)
    known = find_calibration(Mode.DECODE, Precision.FLOAT32, device=device_name(torch.device("cpu")))
    watched = _Watched(task, one, changes, decoder, known)
    a_token = config.n_layers * config.n_kv_heads * (config.d_head + config.d_value)
    size = task.model.embedding.token.weight.element_size()
    yield {
        "kind": "start", "prompt": side(reading.sequence), "layers": config.n_layers, "heads": config.n_heads,
        "kv_heads": config.n_kv_heads, "d_head": config.d_head, "d_value": config.d_value,
        "bytes_per_token": a_token * size, "context_length": config.context_length,
    }  # fmt: skip
    begun = perf_counter()
    logits = watched.prefill(prompt)
    said = StreamingDecoder(task.tokenizer, before=prompt)
    whole = ""
    for step in decode_steps(watched, logits, [text], sampling=sampling, stop_ids=task.stop_ids):
        piece = said.add(step.id) if step.id < task.tokenizer.vocab_size else ""
        if text.finish_reason is not None:
            piece += said.finish()
        whole += piece
        yield _told(task, watched, step, sampling, n=asked.candidates) | {"piece": piece}
    yield _end(text, whole, watched, begun)


def _end(text: GeneratedSequence, whole: str, watched: _Watched, begun: float) -> dict[str, Any]:
    n_passes = len(text.new_ids)
    never = {line for line in watched.unreached if watched.unreached.count(line) == n_passes}
    return {
        "kind": "end", "finish_reason": text.finish_reason, "text": whole, "ids": text.new_ids,
        "milliseconds": 1000 * (perf_counter() - begun), "remarks": sorted(never),
    }  # fmt: skip


def _told(
    task: LanguageModel, watched: _Watched, step: GenerationStep, sampling: SamplingConfig, *, n: int
) -> dict[str, Any]:  # fmt: skip
    assert watched.last is not None
    done, index = watched.last, len(step.sequence.new_ids) - 1
    position = len(step.sequence.prompt) + index - 1
    n_cached, n_bytes = watched.cache_size
    shown = [
        {"id": one.id, "label": named(task.tokenizer, one.id), "probability": one.probability, "revised": one.revised,
         "is_chosen": one.is_chosen}
        for one in top_candidates(step, sampling, n=n)
    ]  # fmt: skip
    mode = Mode.DECODE if done.n_computed == 1 and watched.decoder is not None else Mode.PREFILL
    return {
        "kind": "step", "index": index, "position": position, "id": step.id,
        "label": named(task.tokenizer, step.id),
        "probability": next(one["probability"] for one in shown if one["is_chosen"]), "candidates": shown,
        "attention": done.rows, "computed": done.n_computed, "cache_tokens": n_cached, "cache_bytes": n_bytes,
        **_cost(watched, mode, position + 1), "measured_ms": done.milliseconds,
    }  # fmt: skip


def _cost(watched: _Watched, mode: Mode, length: int) -> dict[str, Any]:
    """Of the pass that chose: the prompt's or a whole text's gives the logits of its last token alone."""
    work = Workload(mode=mode, batch=1, seq_len=length, logits_to_keep=1, device_type=DeviceType.CPU)
    config = watched.task.model.config
    made = estimate_workload(config, work)
    calibration = watched.calibration
    return {
        "flops": made.flops.forward, "bytes": made.traffic.fused,
        "predicted_ms": None if calibration is None else 1000 * predict_time(config, work, calibration).seconds,
        "bound_ms": 1000 * roofline_bound(made, find_device("cpu")).seconds,
    }  # fmt: skip
