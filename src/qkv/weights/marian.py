"""Marian's published names and settings: BART's, with fixed positions and, maybe, two vocabularies."""

from typing import Any

from qkv.choices import PositionKind, SinusoidStyle
from qkv.config import Seq2SeqConfig
from qkv.weights.bart import shared_names, shared_settings, shared_written
from qkv.weights.names import NameTable
from qkv.weights.settings import Settings


def read(given: Settings) -> Seq2SeqConfig:
    given.expect({"normalize_embedding": False, "static_position_embeddings": True})
    of_source = given.need("vocab_size")
    return Seq2SeqConfig(
        vocab_size=given.take("decoder_vocab_size", of_source),
        source_vocab_size=of_source,
        share_embeddings=given.take("share_encoder_decoder_embeddings", True),
        positions=PositionKind.SINUSOIDAL,
        sinusoid=SinusoidStyle.HALVES,
        **shared_settings(given),
    )


def write(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "architectures": ["MarianMTModel"],
        "vocab_size": config.source_vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        **shared_written(config),
    }


def names(config: Seq2SeqConfig) -> NameTable:
    return NameTable(
        renames=shared_names(config),
        prefix="model.",
        # Fixed sinusoids, which our models work out themselves.
        ignored=(r"(encoder|decoder)\.embed_positions\.weight",),
    )
