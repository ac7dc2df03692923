"""Generate text with sampling or beam search, incremental decoding with a KV cache, and stop conditions."""

from qkv.generation.beam import Hypothesis, beam_generate, beam_search
from qkv.generation.decode_engine import (
    DecodeEngine,
    EngineFactory,
    GPTDecodeEngine,
    RNNDecodeEngine,
    SamplingEngine,
    Seq2SeqDecodeEngine,
    eager_engine,
)
from qkv.generation.generate import (
    Candidate,
    GenerationStep,
    decode_steps,
    generate,
    generate_tokens,
    top_raw_and_processed_candidates,
)
from qkv.generation.reference import generate_without_cache, greedy_translate_without_cache
from qkv.generation.sampling import choose_next_ids, process_logits, sample_inverse_cdf
from qkv.generation.sequence import FinishReason, GeneratedSequence, LengthLimit, StopStringFilter, new_sequences
from qkv.generation.translate import translate

__all__ = [
    "Candidate",
    "DecodeEngine",
    "EngineFactory",
    "FinishReason",
    "GPTDecodeEngine",
    "GeneratedSequence",
    "GenerationStep",
    "Hypothesis",
    "LengthLimit",
    "RNNDecodeEngine",
    "SamplingEngine",
    "Seq2SeqDecodeEngine",
    "StopStringFilter",
    "beam_generate",
    "beam_search",
    "choose_next_ids",
    "decode_steps",
    "eager_engine",
    "generate",
    "generate_tokens",
    "generate_without_cache",
    "greedy_translate_without_cache",
    "new_sequences",
    "process_logits",
    "sample_inverse_cdf",
    "top_raw_and_processed_candidates",
    "translate",
]
