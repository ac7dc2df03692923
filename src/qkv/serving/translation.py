"""Build the translation responses, which contain the beam search hypotheses, every search step and the alignment."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qkv.choices import AlignmentLayerAveraging
from qkv.config import BeamConfig
from qkv.errors import InputError
from qkv.generation import DecodeEngine, FinishReason, LengthLimit, beam_search, eager_engine
from qkv.generation.decode_engine import TokenLists
from qkv.generation.translate import force_id
from qkv.inspection.alignment import CrossAttention
from qkv.inspection.model_input import mark_whitespace, prepare_input
from qkv.models import RNNSeq2Seq
from qkv.serving.model_registry import RegisteredModel
from qkv.serving.run_cache import normalize_prefix_and_check_source, token_label, tokens_to_json
from qkv.serving.schemas import TranslateRequest
from qkv.tasks import Task, Translator


class _HypothesisRecordingEngine:
    """A wrapper around a decode engine that records the hypotheses that the beam search extends at each step."""

    def __init__(self, inner: DecodeEngine) -> None:
        self._inner = inner
        self._parents: list[int] | None = None
        self._totals: list[float] = []
        self._log_p: Tensor | None = None
        self.steps: list[list[tuple[int, int, float]]] = []
        """Hypotheses of each step, best first. Each hypothesis consists of its last token id, the index of its parent
        in the previous step, and its total log probability."""

    def reorder(self, rows: Tensor, *, sequences: Tensor | None = None, common_prefix: int = 0) -> None:  # noqa: ARG002
        """Reorder the rows of the batch.

        The argument `common_prefix` is ignored because it only saves work.
        """
        self._parents = rows.tolist()
        self._inner.reorder(rows, sequences=sequences)

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> Tensor:
        self._totals = [0.0] * len(prompts)
        logits = self._inner.prefill(prompts, sources=sources)
        self._log_p = logits.float().log_softmax(-1)
        return logits

    def decode(self, ids: Tensor) -> Tensor:
        assert self._log_p is not None, "prefill must be called before decode"
        token_ids = ids.tolist()
        parents = self._parents or list(range(len(token_ids)))
        totals = [self._totals[row] + float(self._log_p[row, i]) for row, i in zip(parents, token_ids, strict=True)]
        # Rows that only pad the batch repeat the first hypothesis. The dict removes these duplicates.
        extended = {(i, row): total for i, row, total in zip(token_ids, parents, totals, strict=True)}
        self.steps.append([(i, row, total) for (i, row), total in extended.items()])
        self._totals, self._parents = totals, None
        logits = self._inner.decode(ids)
        self._log_p = logits.float().log_softmax(-1)
        return logits

    def close(self) -> None:
        self._inner.close()


def translation_response(loaded: RegisteredModel, task: Task, request: TranslateRequest) -> dict[str, Any]:
    """Translate a text and return the response of `/api/translate`."""
    if not isinstance(task, Translator):
        raise InputError(f"{loaded.id} is not a translation model")
    source_text = normalize_prefix_and_check_source(task, request.text)
    beam = BeamConfig(n_beams=request.beam, n_best=request.beam, length_penalty=request.length_penalty)
    model = task.model
    has_attention = not (isinstance(model, RNNSeq2Seq) and model.decoder.attention is None)
    start = perf_counter()
    with loaded.lock:
        result = task.translate_batch([request.text], beam=beam, max_new=request.max_new, attention=has_attention)[0]
        milliseconds = 1000 * (perf_counter() - start)
        steps = _record_beam_tokens_parents_totals(task, result.source_ids, beam, request.max_new)
    source = prepare_input(task, source_text, result.hypotheses[0].ids).source
    assert source is not None
    hypotheses = [
        {
            "text": hypothesis.text,
            "ids": hypothesis.ids,
            "labels": [mark_whitespace(token) for token in hypothesis.tokens],
            "log_probabilities": hypothesis.log_probabilities,
            "score": hypothesis.score,
            "finish_reason": hypothesis.finish_reason,
        }
        for hypothesis in result.hypotheses
    ]
    return {
        "source": tokens_to_json(source),
        "hypotheses": hypotheses,
        "alignment": None if result.attention is None else _alignment_to_json(result.attention),
        "steps": [
            [
                {"id": i, "label": token_label(task.tokenizer, i), "parent": parent, "log_probability": total}
                for i, parent, total in step
            ]
            for step in steps
        ],
        "milliseconds": milliseconds,
    }


def _record_beam_tokens_parents_totals(
    task: Translator, source_ids: list[int], beam: BeamConfig, max_new: int | None
) -> list[list[tuple[int, int, float]]]:
    """Repeat the beam search and return the hypotheses that a recording engine collects at every step."""
    n_new = min(max_new or 2 * len(source_ids) + 10, task.model.config.context_length)
    with torch.inference_mode():
        engine = _HypothesisRecordingEngine(eager_engine(task.model, batch=1, capacity=n_new))
        logits = engine.prefill([[task.decoder_start_id]], sources=[source_ids])
        if (forced_bos_id := task.generation_config.forced_bos_id) is not None:
            logits = force_id(logits, forced_bos_id)
        beam_search(
            engine,
            logits,
            [LengthLimit(n_new, FinishReason.LENGTH)],
            beam=beam,
            stop_ids=task.stop_ids,
            suppressed_ids=task.generation_config.suppressed_ids,
        )
    return engine.steps


def _alignment_to_json(attention: CrossAttention) -> dict[str, Any]:
    return {
        "weights": attention.average(AlignmentLayerAveraging.ALL),
        "best_layer_weights": attention.average(),
        "best_layer": attention.best_layer,
        "word_pairs": [list(pair) for pair in attention.word_pairs()],
        "pharaoh": attention.to_pharaoh(),
        "source_word_ids": attention.source_word_ids,
        "target_word_ids": attention.target_word_ids,
    }
