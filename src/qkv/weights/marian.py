"""Map Marian's published config and tensor names to ours. They match BART's except that positions are sinusoidal."""

from typing import Any

from qkv.choices import PositionKind, SinusoidStyle
from qkv.config import Seq2SeqConfig
from qkv.weights.bart import bart_and_marian_mappings, pop_bart_marian_settings, to_hf_bart_marian_settings
from qkv.weights.name_table import NameTable
from qkv.weights.published_config import PublishedConfig


def read_marian_config(published: PublishedConfig) -> Seq2SeqConfig:
    published.pop_expected_values({"normalize_embedding": False, "static_position_embeddings": True})
    source_vocab_size = published.pop_required("vocab_size")
    return Seq2SeqConfig(
        vocab_size=published.pop("decoder_vocab_size", source_vocab_size),
        source_vocab_size=source_vocab_size,
        share_embeddings=published.pop("share_encoder_decoder_embeddings", True),
        positions=PositionKind.SINUSOIDAL,
        sinusoid=SinusoidStyle.HALVES,
        **pop_bart_marian_settings(published),
    )


def to_hf_marian_config(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "architectures": ["MarianMTModel"],
        "vocab_size": config.source_vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        **to_hf_bart_marian_settings(config),
    }


def marian_name_table(config: Seq2SeqConfig) -> NameTable:
    return NameTable(
        mappings=bart_and_marian_mappings(config),
        prefix="model.",
        # These are sinusoidal position embeddings, which our models compute instead of loading them.
        ignored_patterns=(r"(encoder|decoder)\.embed_positions\.weight",),
    )
