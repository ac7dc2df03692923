"""A source in, the best texts for it out: ids alone."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from qkv.config import BeamConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation.beam import Hypothesis, beam_search
from qkv.generation.decoder import Decoder, Rows, read_sources
from qkv.generation.lean import lean_step
from qkv.generation.packing import Packing, packing_of
from qkv.generation.sampling import NextLogits
from qkv.generation.text import Ended, Limit
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.weights.decoding import Decoding

GREEDY = BeamConfig(n_beams=1)


@torch.inference_mode()
def translate(
    model: Seq2Seq | RNNSeq2Seq,
    sources: Sequence[Sequence[int]],
    *,
    first: int,
    max_new: Sequence[int],
    stop_ids: frozenset[int],
    beam: BeamConfig = GREEDY,
    forced: Sequence[Sequence[Sequence[int]]] = (),
    packing: Packing | None = None,
    decoding: Decoding = Decoding(),  # noqa: B008 - frozen
) -> list[list[Hypothesis]]:
    """The best `beam.n_best` texts for each source, best first; sources have any lengths.

    `first`: the id that every text begins with, which is not given back. `max_new`, `forced`: one a source; the
    model's context bounds a text too. `packing`: of `packing_of(model)`, kept from call to call; it takes
    as long as a few steps to make. `decoding`: what every text has first, and what none may hold.
    """
    if not sources:
        return []
    limits = _limits(sources, max_new, room=model.config.context_length)
    # The last new token is never read, and the first one is read without being new.
    capacity = max(limit.n_new for limit in limits)
    if not 0 <= first < model.config.vocab_size:
        raise InputError(f"first={first} is outside the vocabulary of {model.config.vocab_size}")
    packing = packing or packing_of(model)
    lean = lean_step(model, packing, capacity=capacity) if isinstance(model, Seq2Seq) else None
    with packing.used() if lean is None else nullcontext():
        decoder = read_sources(model, sources, capacity=capacity, lean=lean)
        begun = torch.full((len(sources),), first, device=next(model.parameters()).device)
        logits = first_logits(decoder, begun, then=decoding.then)
        return beam_search(decoder, logits, limits, beam=beam, stop_ids=stop_ids, forced=forced, never=decoding.never)


def first_logits(decoder: Decoder, begun: Rows, *, then: int | None) -> NextLogits:
    """After the ids that begin the texts. `then`: what must follow them; as nothing else can, its log p is 0."""
    logits = decoder.step(begun)
    if then is not None:
        logits = torch.full_like(logits, float("-inf"))
        logits[:, then] = 0.0
    return logits


def _limits(sources: Sequence[Sequence[int]], max_new: Sequence[int], *, room: int) -> list[Limit]:
    if len(max_new) != len(sources):
        raise InputError(f"max_new has {len(max_new)} numbers for {len(sources)} sources")
    for row, (source, n) in enumerate(zip(sources, max_new, strict=True)):
        if not source:
            raise InputError(f"source {row} is empty: 0 tokens, there must be at least 1")
        if len(source) > room:
            raise ContextLengthError(f"source {row} has {len(source)} tokens; the model's context_length is {room}")
        if n < 1:
            raise InputError(f"source {row}: {n} new tokens were asked for; at least 1 is needed")
    return [Limit(n, Ended.LENGTH) if n < room else Limit(room, Ended.CONTEXT) for n in max_new]
