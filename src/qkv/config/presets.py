"""Named model configs such as gpt2, llama-3-8b and bert-base."""

from collections.abc import Callable
from typing import Any

from qkv.choices import Activation, NormKind, NormPosition, PositionKind
from qkv.config.base import did_you_mean_suffix
from qkv.config.model import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import ConfigError


def _gpt2_config(n_layers: int, d_model: int, n_heads: int, context_length: int = 1024) -> GPTConfig:
    return GPTConfig(
        vocab_size=50257,
        context_length=context_length,
        d_model=d_model,
        n_heads=n_heads,
        n_layers=n_layers,
    )


def _llama_7b_config(context_length: int, **other_fields: Any) -> GPTConfig:  # noqa: ANN401
    return GPTConfig(
        context_length=context_length,
        n_layers=32,
        d_model=4096,
        n_heads=32,
        positions=PositionKind.ROTARY,
        norm=NormKind.RMS,
        activation=Activation.SILU,
        gated=True,
        attention_bias=False,
        feed_forward_bias=False,
        tie_embeddings=False,
        **other_fields,
    )


def _bert_config(n_layers: int, d_model: int, n_heads: int, vocab_size: int = 30522) -> BERTConfig:
    return BERTConfig(
        vocab_size=vocab_size,
        context_length=512,
        d_model=d_model,
        n_heads=n_heads,
        n_layers=n_layers,
    )


def _transformer_2017(d_model: int, n_heads: int) -> Seq2SeqConfig:
    """Create a config for the model of arXiv:1706.03762, with 37,000 joint subwords and no attention biases."""
    return Seq2SeqConfig(
        vocab_size=37000,
        context_length=512,
        d_model=d_model,
        n_heads=n_heads,
        n_encoder_layers=6,
        n_decoder_layers=6,
        attention_bias=False,
        dropout=0.1,
    )


def _t5_small_config() -> Seq2SeqConfig:
    return Seq2SeqConfig(
        vocab_size=32128,
        context_length=512,
        d_model=512,
        n_heads=8,
        d_head=64,
        d_ff=2048,
        n_encoder_layers=6,
        n_decoder_layers=6,
        positions=PositionKind.RELATIVE,
        norm=NormKind.RMS,
        norm_position=NormPosition.PRE,
        norm_eps=1e-6,
        final_norm=True,
        attention_bias=False,
        feed_forward_bias=False,
        scale_scores=False,
        scale_embedding=False,
        scale_logits=True,
    )


def _nano_settings(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    # At this width, initial weights with a standard deviation of 0.02 are so small that learning stalls for hundreds of
    # steps.
    common = {"vocab_size": 512, "context_length": 128, "d_model": 64, "n_heads": 4, "init_std": 0.05}
    return {**common, **changes}


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt-nano": lambda: GPTConfig(**_nano_settings(n_layers=2)),
    "gpt2": lambda: _gpt2_config(12, 768, 12),
    "gpt2-medium": lambda: _gpt2_config(24, 1024, 16),
    "gpt2-large": lambda: _gpt2_config(36, 1280, 20),
    "gpt2-xl": lambda: _gpt2_config(48, 1600, 25),
    "gpt3": lambda: _gpt2_config(96, 12288, 96, context_length=2048),
    "llama-nano": lambda: GPTConfig(
        **_nano_settings(
            n_layers=2,
            n_kv_heads=2,
            positions=PositionKind.ROTARY,
            norm=NormKind.RMS,
            activation=Activation.SILU,
            gated=True,
            attention_bias=False,
            feed_forward_bias=False,
        )
    ),
    "llama-2-7b": lambda: _llama_7b_config(4096, vocab_size=32000, d_ff=11008),
    "llama-3-8b": lambda: _llama_7b_config(8192, vocab_size=128256, d_ff=14336, n_kv_heads=8, rope_theta=500000.0),
    "bert-nano": lambda: BERTConfig(**_nano_settings(n_layers=2)),
    "bert-tiny": lambda: _bert_config(2, 128, 2),
    "bert-small": lambda: _bert_config(4, 512, 8),
    "bert-medium": lambda: _bert_config(8, 512, 8),
    "bert-base": lambda: _bert_config(12, 768, 12),
    "bert-base-cased": lambda: _bert_config(12, 768, 12, vocab_size=28996),
    "bert-base-zh": lambda: _bert_config(12, 768, 12, vocab_size=21128),
    "bert-base-multi": lambda: _bert_config(12, 768, 12, vocab_size=119547),
    "bert-large": lambda: _bert_config(24, 1024, 16),
    "transformer-nano": lambda: Seq2SeqConfig(**_nano_settings(n_encoder_layers=2, n_decoder_layers=2)),
    "transformer-base": lambda: _transformer_2017(512, 8),
    "transformer-big": lambda: _transformer_2017(1024, 16),
    "t5-small": _t5_small_config,
    "rnn-nano": lambda: RNNConfig(vocab_size=512, d_model=64),
}


def preset(name: str, **changes: Any) -> ModelConfig:  # noqa: ANN401
    """Return a preset config with some fields changed, e.g. `preset("gpt2", context_length=256)`."""
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset '{name}'{did_you_mean_suffix(name, list(PRESETS))}; "
            f"available presets: {', '.join(PRESETS)}"
        )
    config = PRESETS[name]()
    return config.replace(**changes) if changes else config
