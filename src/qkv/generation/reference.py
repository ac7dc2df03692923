"""Reference implementations of generation and translation for a single sequence, without a cache.

All other implementations must produce the same ids. The full sequence is recomputed at every step, so generating n
tokens takes n full forward passes. Only tests use this module.
"""

from collections.abc import Sequence
from random import Random

import torch

from qkv.choices import AttentionKernel
from qkv.config import SamplingConfig
from qkv.generation.sampling import choose_next_ids
from qkv.generation.sequence import FinishReason, GeneratedSequence, LengthLimit, new_sequences
from qkv.models import GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import use_attention_kernel


@torch.inference_mode()
def generate_without_cache(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = frozenset(),
) -> GeneratedSequence:
    """Continue a prompt, recomputing the full sequence at every step."""
    (sequence,) = new_sequences([prompt], max_new=max_new, context_length=model.config.context_length)
    generator = Random(sampling.seed)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        while sequence.finish_reason is None:
            logits = model(torch.tensor([sequence.ids], device=model.embedding.token.weight.device))[:, -1]
            seen_mask = torch.zeros_like(logits, dtype=torch.bool)
            seen_mask[0, sequence.ids] = True
            uniform = torch.tensor([generator.random()])
            token_id = int(choose_next_ids(logits, sampling, seen_mask=seen_mask, uniform=uniform))
            sequence.append_token(token_id, float(logits.log_softmax(-1)[0, token_id]), stop_ids)
    return sequence


@torch.inference_mode()
def greedy_translate_without_cache(
    model: Seq2Seq | RNNSeq2Seq, source: Sequence[int], *, start_id: int, max_new: int, stop_ids: frozenset[int]
) -> GeneratedSequence:
    """Translate a source greedily, recomputing source and target at every step."""
    sequence = GeneratedSequence([start_id], LengthLimit(max_new, FinishReason.LENGTH))
    source_ids = torch.tensor([list(source)], device=next(model.parameters()).device)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        while sequence.finish_reason is None:
            log_p = model(source_ids, torch.tensor([sequence.ids], device=source_ids.device))[0, -1].log_softmax(-1)
            token_id = int(log_p.argmax())
            sequence.append_token(token_id, float(log_p[token_id]), stop_ids)
    return sequence
