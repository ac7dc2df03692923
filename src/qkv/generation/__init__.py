"""Logits to ids: sampling, prefill and decode with the cache, beam search, stopping."""

from qkv.generation.beam import Hypothesis, beam_generate, beam_search
from qkv.generation.candidates import Candidate, candidates
from qkv.generation.decoder import Decoder, GPTDecoder, RNNDecoder, Seq2SeqDecoder, read_sources
from qkv.generation.generate import Step, decode, generate, steps
from qkv.generation.plain import generate_plainly, translate_plainly
from qkv.generation.sampling import adjusted, choose, draw
from qkv.generation.stopping import StopStrings
from qkv.generation.text import Ended, Limit, Text, begin
from qkv.generation.translate import translate

__all__ = [
    "Candidate",
    "Decoder",
    "Ended",
    "GPTDecoder",
    "Hypothesis",
    "Limit",
    "RNNDecoder",
    "Seq2SeqDecoder",
    "Step",
    "StopStrings",
    "Text",
    "adjusted",
    "beam_generate",
    "beam_search",
    "begin",
    "candidates",
    "choose",
    "decode",
    "draw",
    "generate",
    "generate_plainly",
    "read_sources",
    "steps",
    "translate",
    "translate_plainly",
]
