"""Checks that optimized implementations agree with the eager implementation."""

import os
import shutil

import torch

from qkv.choices import AttentionKernel
from qkv.config import BeamConfig, SamplingConfig
from qkv.generation import beam_generate, generate, translate
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import use_attention_kernel
from qkv.tasks.verification import implementations
from qkv.tasks.verification.case import NotCheckedError, VerificationCase, max_relative_difference

N_NEW_TOKENS = 16


def compare_fused(case: VerificationCase) -> float:
    if isinstance(case.model, RNNSeq2Seq):
        raise NotCheckedError("an RNN's attention has only one kernel")
    return case.difference(implementations.forward(case.model, one.ids, one.source)[0] for one in case.examples)


def compare_with_cpu(case: VerificationCase) -> float:
    assert case.by_cpu is not None, "only used when another device is verified"
    return max_relative_difference(case.plain, case.by_cpu)


def compare_cached(case: VerificationCase) -> float:
    model = _require_generative(case)
    ends = [(one, one.ids.shape[1]) for one in case.examples]
    return case.difference(
        implementations.forward_in_chunks(model, one.ids, range(n // 2, n), source=one.source)[0] for one, n in ends
    )


def compare_batched(case: VerificationCase) -> float:
    """Compare a text in a batch with its reversed copy with the text by itself."""
    both = [
        [part if part is None else torch.cat((part.flip(1), part)) for part in (one.ids, one.source)]
        for one in case.examples
    ]
    return case.difference(
        implementations.forward(case.model, ids, source)[1] for ids, source in both if ids is not None
    )


def compare_padded(case: VerificationCase) -> float:
    return case.difference(implementations.forward_padded(case.model, case.examples))


def compare_packed(case: VerificationCase) -> float:
    """Compare a text packed behind another text with the text by itself."""
    model, texts = case.model, [one.ids for one in case.examples]
    if not isinstance(model, GPT | BERT):
        raise NotCheckedError("an encoder–decoder takes one text per row")
    return case.difference(
        implementations.forward_packed(model, [texts[i - 1], texts[i]])[1] for i in range(len(texts))
    )


def compare_compiled(case: VerificationCase) -> float:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        raise NotCheckedError("torch.compile requires a C++ compiler (g++ or clang++), and none was found")
    forward = torch.compile(implementations.forward, dynamic=True)
    return case.difference(forward(case.model, one.ids, one.source)[0] for one in case.examples)


def compare_generated(case: VerificationCase, *, n_beams: int) -> float:
    """Compare the log-probabilities of generated tokens with those of the eager implementation.

    With greedy decoding, the gap to the most likely token also counts. Comparing log-probabilities instead of tokens
    allows two tokens that are equally likely up to rounding to be exchanged.
    """
    shares = []
    for one, (new, log_p) in zip(case.examples, _generate_for_all(case, n_beams=n_beams), strict=True):
        before = one.ids if one.source is None else one.ids[:, :1]
        ids = torch.cat((before, torch.tensor([new[:-1]], dtype=torch.long, device=case.device)), dim=1)
        with use_attention_kernel(case.model, AttentionKernel.PLAIN):
            logits = implementations.forward(case.model, ids, one.source)[0, -len(new) :].double().cpu()
        table = logits.log_softmax(-1)
        own = table.gather(1, torch.tensor(new)[:, None])[:, 0]
        gaps = [(own - torch.tensor(log_p, dtype=torch.float64)).abs()] + [table.amax(1) - own] * (n_beams == 1)
        shares.append(torch.cat(gaps).max() / logits.abs().max().clamp(min=1.0))
    return float(torch.stack(shares).max())


def _require_generative(case: VerificationCase) -> GPT | Seq2Seq | RNNSeq2Seq:
    model = case.model
    if isinstance(model, BERT):
        raise NotCheckedError("a BERT does not generate text")
    if isinstance(model, GPT) and not model.config.causal:
        raise NotCheckedError("a model with causal=False does not generate text")
    return model


def _generate_for_all(case: VerificationCase, *, n_beams: int) -> list[tuple[list[int], list[float]]]:
    """Generate from all examples in one batch, and return the new ids with their log-probabilities.

    No stop token is set, so that all outputs have the full length.
    """
    model, how = _require_generative(case), BeamConfig(n_beams=n_beams)
    prompts = [one.ids[0].tolist() for one in case.examples]
    if isinstance(model, GPT) and n_beams == 1:
        texts = generate(model, prompts, max_new=N_NEW_TOKENS, sampling=SamplingConfig(temperature=0.0))
        return [(text.new_ids, text.log_probabilities) for text in texts]
    if isinstance(model, GPT):
        found = beam_generate(model, prompts, max_new=N_NEW_TOKENS, beam=how)
    else:
        sources = [one.source[0].tolist() for one in case.examples if one.source is not None]
        most = [N_NEW_TOKENS] * len(sources)
        found = translate(model, sources, start_id=prompts[0][0], max_new=most, stop_ids=frozenset(), beam=how)
    return [(best.ids, best.log_probabilities) for best, *_ in found]
