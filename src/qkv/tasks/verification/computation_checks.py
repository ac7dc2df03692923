"""Check that optimized implementations agree with the eager implementation."""

import os
import shutil

import torch

from qkv.choices import AttentionKernel
from qkv.config import BeamConfig, SamplingConfig
from qkv.engines import Backend, reason_unsupported
from qkv.generation import EngineFactory, beam_generate, eager_engine, generate, translate
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import use_attention_kernel
from qkv.tasks.verification import implementations
from qkv.tasks.verification.case import NotCheckedError, VerificationCase, max_difference_relative_to_peak

N_NEW_TOKENS = 16


def compare_fused_attention(case: VerificationCase) -> float:
    if isinstance(case.model, RNNSeq2Seq):
        raise NotCheckedError("RNNs have only one attention kernel")
    return case.relative_difference_from_reference(
        implementations.forward(case.model, example.ids, example.source)[0] for example in case.examples
    )


def compare_with_cpu(case: VerificationCase) -> float:
    assert case.cpu_outputs is not None, "only used when another device is verified"
    return max_difference_relative_to_peak(case.reference_outputs, case.cpu_outputs)


def compare_cached(case: VerificationCase) -> float:
    model = _require_generative(case)
    ends = [(example, example.ids.shape[1]) for example in case.examples]
    return case.relative_difference_from_reference(
        implementations.forward_in_chunks(model, example.ids, range(n // 2, n), source=example.source)[0]
        for example, n in ends
    )


def compare_batched(case: VerificationCase) -> float:
    """Compare the outputs for a text with and without a reversed copy of it in the same batch."""
    pairs = [
        [tensor if tensor is None else torch.cat((tensor.flip(1), tensor)) for tensor in (example.ids, example.source)]
        for example in case.examples
    ]
    return case.relative_difference_from_reference(
        implementations.forward(case.model, ids, source)[1] for ids, source in pairs if ids is not None
    )


def compare_padded(case: VerificationCase) -> float:
    return case.relative_difference_from_reference(implementations.forward_padded(case.model, case.examples))


def compare_packed(case: VerificationCase) -> float:
    """Compare the outputs for a text packed after another text with those for the same text in a separate row."""
    model, texts = case.model, [example.ids for example in case.examples]
    if not isinstance(model, GPT | BERT):
        raise NotCheckedError("packing is not supported for encoder–decoders")
    return case.relative_difference_from_reference(
        implementations.forward_packed(model, [texts[i - 1], texts[i]])[1] for i in range(len(texts))
    )


def compare_compiled(case: VerificationCase) -> float:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        raise NotCheckedError("torch.compile requires a C++ compiler (g++ or clang++), but none was found")
    forward = torch.compile(implementations.forward, dynamic=True)
    return case.relative_difference_from_reference(
        forward(case.model, example.ids, example.source)[0] for example in case.examples
    )


def compare_backend(case: VerificationCase, *, backend: Backend) -> float:
    """Compare the tokens that a backend generates, or the states that it encodes, with the eager implementation."""
    if (reason := reason_unsupported(backend, case.model)) is not None:
        raise NotCheckedError(reason)
    if isinstance(case.model, BERT):
        engine = backend.encode_engine(case.model)
        ids = [example.ids[0].tolist() for example in case.examples]
        states = dict[int, torch.Tensor]()
        for indices in engine.group([len(row) for row in ids]):
            encoded = engine.encode([ids[index] for index in indices])
            states |= {index: encoded[i, : len(ids[index])] for i, index in enumerate(indices)}
        return case.relative_difference_from_reference(states[index] for index in range(len(ids)))
    return max(
        relative_generated_log_prob_error(case, n_beams=n_beams, create_engine=backend.decode_engine)
        for n_beams in (1, 3)
    )


def relative_generated_log_prob_error(
    case: VerificationCase, *, n_beams: int, create_engine: EngineFactory = eager_engine
) -> float:
    """Compare the log-probabilities of generated tokens with those of the eager implementation.

    For greedy decoding, the gap to the most likely token is also included. Log-probabilities are compared instead of
    tokens because rounding may swap two equally likely tokens.
    """
    shares, generated = [], _generate_for_all(case, n_beams=n_beams, create_engine=create_engine)
    for example, (new_ids, new_log_probs) in zip(case.examples, generated, strict=True):
        prompt = example.ids if example.source is None else example.ids[:, :1]
        ids = torch.cat((prompt, torch.tensor([new_ids[:-1]], dtype=torch.long, device=case.device)), dim=1)
        with use_attention_kernel(case.model, AttentionKernel.EAGER):
            logits = implementations.forward(case.model, ids, example.source)[0, -len(new_ids) :].double().cpu()
        expected = logits.log_softmax(-1)
        log_probs = expected.gather(1, torch.tensor(new_ids)[:, None])[:, 0]
        gaps = [(log_probs - torch.tensor(new_log_probs, dtype=torch.float64)).abs()] + [
            expected.amax(1) - log_probs
        ] * (n_beams == 1)
        shares.append(torch.cat(gaps).max() / logits.abs().max().clamp(min=1.0))
    return float(torch.stack(shares).max())


def _require_generative(case: VerificationCase) -> GPT | Seq2Seq | RNNSeq2Seq:
    model = case.model
    if isinstance(model, BERT):
        raise NotCheckedError("BERT models do not generate text")
    if isinstance(model, GPT) and not model.config.causal:
        raise NotCheckedError("models with causal=False do not generate text")
    return model


def _generate_for_all(
    case: VerificationCase, *, n_beams: int, create_engine: EngineFactory
) -> list[tuple[list[int], list[float]]]:
    """Generate tokens for all examples in one batch, and return the new ids with their log-probabilities.

    No stop token is set, so all outputs have the full length.
    """
    model, beam_config = _require_generative(case), BeamConfig(n_beams=n_beams)
    prompts = [example.ids[0].tolist() for example in case.examples]
    if isinstance(model, GPT) and n_beams == 1:
        texts = generate(
            model,
            prompts,
            max_new=N_NEW_TOKENS,
            sampling=SamplingConfig(temperature=0.0),
            create_engine=create_engine,
        )
        return [(text.new_ids, text.log_probabilities) for text in texts]
    if isinstance(model, GPT):
        results = beam_generate(model, prompts, max_new=N_NEW_TOKENS, beam=beam_config, create_engine=create_engine)
    else:
        sources = [example.source[0].tolist() for example in case.examples if example.source is not None]
        max_new = [N_NEW_TOKENS] * len(sources)
        results = translate(
            model,
            sources,
            start_id=prompts[0][0],
            max_new=max_new,
            stop_ids=frozenset(),
            beam=beam_config,
            create_engine=create_engine,
        )
    return [(best.ids, best.log_probabilities) for best, *_ in results]
