"""What generation means, as plainly as it can be said: one text, no cache, all computed anew at each step.

Every other road must give the same ids. It costs n times as much for n tokens, so nobody else takes it.
"""

from collections.abc import Sequence
from random import Random

import torch

from qkv.choices import AttentionKernel
from qkv.config import SamplingConfig
from qkv.generation.sampling import choose_next_ids
from qkv.generation.sequence import FinishReason, GeneratedSequence, LengthLimit, new_sequences
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import using


@torch.inference_mode()
def generate_reference(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = frozenset(),
) -> GeneratedSequence:
    (text,) = new_sequences([prompt], max_new=max_new, context_length=model.config.context_length)
    chance = Random(sampling.seed)
    with using(model, AttentionKernel.PLAIN):
        while text.finish_reason is None:
            logits = model(torch.tensor([text.ids], device=model.embedding.token.weight.device))[:, -1]
            said = torch.zeros_like(logits, dtype=torch.bool)
            said[0, text.ids] = True
            number = int(choose_next_ids(logits, sampling, seen_mask=said, uniform=torch.tensor([chance.random()])))
            text.add(number, float(logits.log_softmax(-1)[0, number]), stop_ids)
    return text


@torch.inference_mode()
def translate_reference(
    model: Seq2Seq | RNNSeq2Seq, source: Sequence[int], *, start_id: int, max_new: int, stop_ids: frozenset[int]
) -> GeneratedSequence:
    """The likeliest next id at each step; source and text are read anew each time."""
    text = GeneratedSequence([start_id], LengthLimit(max_new, FinishReason.LENGTH))
    source_ids = torch.tensor([list(source)], device=next(model.parameters()).device)
    with using(model, AttentionKernel.PLAIN):
        while text.finish_reason is None:
            log_p = model(source_ids, torch.tensor([text.ids], device=source_ids.device))[0, -1].log_softmax(-1)
            number = int(log_p.argmax())
            text.add(number, float(log_p[number]), stop_ids)
    return text
