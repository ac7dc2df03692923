"""A source in, the best texts for it out: ids alone."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from qkv.config import BeamConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation.beam import Hypothesis, beam_search
from qkv.generation.cpu_decode_engine import create_cpu_decode_engine
from qkv.generation.decoder import Decoder, Rows, encode_sources
from qkv.generation.prepacked_weights import PrepackedWeights, prepack_weights
from qkv.generation.sampling import NextLogits
from qkv.generation.sequence import FinishReason, LengthLimit
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.weights.decoding import Decoding

GREEDY = BeamConfig(n_beams=1)


@torch.inference_mode()
def translate(
    model: Seq2Seq | RNNSeq2Seq,
    sources: Sequence[Sequence[int]],
    *,
    start_id: int,
    max_new: Sequence[int],
    stop_ids: frozenset[int],
    beam: BeamConfig = GREEDY,
    forced: Sequence[Sequence[Sequence[int]]] = (),
    packing: PrepackedWeights | None = None,
    decoding: Decoding = Decoding(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """The best `beam.n_best` texts for each source, best first; sources have any lengths.

    `start_id`: the id that every text begins with, which is not given back. `max_new`, `forced`: one a source; the
    model's context bounds a text too. `packing`: of `prepack_weights(model)`, kept from call to call; it takes
    as long as a few steps to make. `decoding`: what every text has first, and what none may hold.
    """
    if not sources:
        return []
    limits = _length_limits(sources, max_new, room=model.config.context_length)
    # The last new token is never read, and the first one is read without being new.
    capacity = max(limit.max_new_tokens for limit in limits)
    if not 0 <= start_id < model.config.vocab_size:
        raise InputError(f"start_id={start_id} is outside the vocabulary of {model.config.vocab_size}")
    packing = packing or prepack_weights(model)
    lean = create_cpu_decode_engine(model, packing, capacity=capacity) if isinstance(model, Seq2Seq) else None
    with packing.used() if lean is None else nullcontext():
        decoder = encode_sources(model, sources, capacity=capacity, cpu_engine=lean)
        begun = torch.full((len(sources),), start_id, device=next(model.parameters()).device)
        logits = initial_logits(decoder, begun, forced_bos_id=decoding.forced_bos_id)
        return beam_search(
            decoder,
            logits,
            limits,
            beam=beam,
            stop_ids=stop_ids,
            constraints=forced,
            suppressed_ids=decoding.suppressed_ids,
        )


def initial_logits(decoder: Decoder, begun: Rows, *, then: int | None) -> NextLogits:
    """After the ids that begin the texts. `then`: what must follow them; as nothing else can, its log p is 0."""
    logits = decoder.step(begun)
    if then is not None:
        logits = torch.full_like(logits, float("-inf"))
        logits[:, then] = 0.0
    return logits


def _length_limits(sources: Sequence[Sequence[int]], max_new: Sequence[int], *, room: int) -> list[LengthLimit]:
    if len(max_new) != len(sources):
        raise InputError(f"max_new has {len(max_new)} numbers for {len(sources)} sources")
    for row, (source, n) in enumerate(zip(sources, max_new, strict=True)):
        if not source:
            raise InputError(f"source {row} is empty: 0 tokens, there must be at least 1")
        if len(source) > room:
            raise ContextLengthError(f"source {row} has {len(source)} tokens; the model's context_length is {room}")
        if n < 1:
            raise InputError(f"source {row}: {n} new tokens were asked for; at least 1 is needed")
    return [
        LengthLimit(n, FinishReason.LENGTH) if n < room else LengthLimit(room, FinishReason.CONTEXT) for n in max_new
    ]
