"""Translate source token ids to target token ids with beam search."""

from collections.abc import Sequence
from contextlib import closing

import torch

from qkv.config import BeamConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation.beam import Hypothesis, beam_search
from qkv.generation.decode_engine import EngineFactory, eager_engine
from qkv.generation.sampling import NextLogits
from qkv.generation.sequence import FinishReason, LengthLimit
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.weights.generation_config import GenerationConfig


@torch.inference_mode()
def translate(
    model: Seq2Seq | RNNSeq2Seq,
    sources: Sequence[Sequence[int]],
    *,
    start_id: int,
    max_new: Sequence[int],
    stop_ids: frozenset[int],
    beam: BeamConfig | None = None,
    constraints: Sequence[Sequence[Sequence[int]]] = (),
    create_engine: EngineFactory = eager_engine,
    generation_config: GenerationConfig = GenerationConfig(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """Translate each source and return the `beam.n_best` hypotheses for each source, best first.

    Sources may have different lengths. Every target starts with `start_id`, which is not part of the result. `max_new`
    and `constraints` have one entry per source. `beam` defaults to greedy search. Outputs are also limited by the
    model's context. `create_engine` selects the implementation of the model (default: eager). `generation_config`
    defines the forced first token and the suppressed ids.
    """
    if not sources:
        return []
    limits = _check_and_limit_lengths(sources, max_new, context_length=model.config.context_length)
    # The start token takes a slot in the cache. The last new token does not because it is never fed back to the model.
    capacity = max(limit.max_new_tokens for limit in limits)
    if not 0 <= start_id < model.config.vocab_size:
        raise InputError(
            f"start_id must be at least 0 and less than the vocabulary size ({model.config.vocab_size}), got {start_id}"
        )
    with closing(create_engine(model, batch=len(sources), capacity=capacity)) as engine:
        logits = engine.prefill([[start_id]] * len(sources), sources=sources)
        if generation_config.forced_bos_id is not None:
            logits = force_id(logits, generation_config.forced_bos_id)
        return beam_search(
            engine,
            logits,
            limits,
            beam=beam or BeamConfig(n_beams=1),
            stop_ids=stop_ids,
            constraints=constraints,
            suppressed_ids=generation_config.suppressed_ids,
        )


def force_id(logits: NextLogits, token_id: int) -> NextLogits:
    """Return logits for which the given token has log-probability 0 and all other tokens are impossible."""
    forced = torch.full_like(logits, float("-inf"))
    forced[:, token_id] = 0.0
    return forced


def _check_and_limit_lengths(
    sources: Sequence[Sequence[int]], max_new: Sequence[int], *, context_length: int
) -> list[LengthLimit]:
    """Validate the sources and limit each target to `max_new` tokens or the context length."""
    if len(max_new) != len(sources):
        raise InputError(f"max_new must have one entry for each of the {len(sources)} sources, got {len(max_new)}")
    for row, (source, n) in enumerate(zip(sources, max_new, strict=True)):
        if not source:
            raise InputError(f"source {row} must have at least 1 token, got 0")
        if len(source) > context_length:
            raise ContextLengthError(
                f"source {row} has {len(source)} tokens, which exceeds context_length={context_length}"
            )
        if n < 1:
            raise InputError(f"source {row}: max_new must be at least 1, got {n}")
    return [
        LengthLimit(n, FinishReason.LENGTH) if n < context_length else LengthLimit(context_length, FinishReason.CONTEXT)
        for n in max_new
    ]
