"""Which models, at which sizes, is the prediction of times tried on?"""

from typing import Any

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, preset


def models(kind: str) -> dict[str, ModelConfig]:
    """By name; sizes stand between those of the calibration's grid."""
    if kind == "cpu":
        llama: dict[str, Any] = {"d_model": 320, "n_heads": 5, "n_layers": 6, "d_ff": 864, "vocab_size": 4096}
        return {
            "gpt-nano": preset("gpt-nano"),
            "gpt 192×4": GPTConfig(vocab_size=2003, context_length=4096, d_model=192, n_heads=3, n_layers=4),
            "gpt2": preset("gpt2"),
            "llama 320×6": _llama(llama),
            "bert 384×3": BERTConfig(
                vocab_size=8000, context_length=512, d_model=384, n_heads=6, n_layers=3, masked_word_head=True
            ),
            "seq2seq 256×3+2": Seq2SeqConfig(
                vocab_size=6000, context_length=512, d_model=256, n_heads=4, n_encoder_layers=3, n_decoder_layers=2
            ),
            "rnn 192": RNNConfig(vocab_size=5000, d_model=192),
        }
    llama = {"d_model": 2048, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8, "d_ff": 5632, "vocab_size": 32000}
    return {
        "gpt-nano": preset("gpt-nano"),
        "gpt2": preset("gpt2", context_length=4096),
        "gpt 384×6": GPTConfig(vocab_size=4096, context_length=8192, d_model=384, n_heads=6, n_layers=6),
        "gpt2-large": preset("gpt2-large"),
        "llama 2048×8": _llama(llama),
        "bert-base": preset("bert-base", masked_word_head=True),
        "transformer-base": preset("transformer-base", dropout=0.0),
        "rnn 512": RNNConfig(vocab_size=16000, d_model=512),
    }


def _llama(shape: dict[str, Any]) -> GPTConfig:
    return GPTConfig(
        context_length=8192, positions="rotary", norm="rms", activation="silu", gated=True, attention_bias=False,
        feed_forward_bias=False, tie_embeddings=False, **shape,
    )  # type: ignore[arg-type]  # fmt: skip


def sizes(kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(model, mode, batch and lengths)."""
    if kind == "cpu":
        return [
            ("gpt-nano", "decode", {"batch": 1, "length": 40}),
            ("gpt-nano", "forward", {"batch": 1, "length": 12}),
            ("gpt-nano", "train", {"batch": 2, "length": 24}),
            ("gpt 192×4", "forward", {"batch": 4, "length": 130}),
            ("gpt 192×4", "train", {"batch": 4, "length": 130}),
            ("gpt 192×4", "prefill", {"batch": 1, "length": 300}),
            ("gpt 192×4", "decode", {"batch": 1, "length": 300}),
            ("gpt 192×4", "decode", {"batch": 8, "length": 700}),
            ("gpt 192×4", "forward", {"batch": 1, "length": 1500}),
            ("gpt 192×4", "forward", {"batch": 1, "length": 700, "kernel": "plain"}),
            ("gpt 192×4", "train", {"batch": 1, "length": 900}),
            ("gpt2", "forward", {"batch": 1, "length": 100}),
            ("gpt2", "decode", {"batch": 1, "length": 200}),
            ("gpt2", "train", {"batch": 1, "length": 100}),
            ("llama 320×6", "forward", {"batch": 2, "length": 200}),
            ("llama 320×6", "train", {"batch": 2, "length": 90}),
            ("llama 320×6", "prefill", {"batch": 1, "length": 400}),
            ("llama 320×6", "decode", {"batch": 1, "length": 400}),
            ("llama 320×6", "decode", {"batch": 6, "length": 150}),
            ("bert 384×3", "forward", {"batch": 8, "length": 60}),
            ("bert 384×3", "train", {"batch": 4, "length": 90}),
            ("seq2seq 256×3+2", "forward", {"batch": 4, "length": 40, "source_length": 50}),
            ("seq2seq 256×3+2", "train", {"batch": 4, "length": 40, "source_length": 50}),
            ("seq2seq 256×3+2", "decode", {"batch": 2, "length": 60, "source_length": 80}),
            ("rnn 192", "forward", {"batch": 12, "length": 25, "source_length": 30}),
            ("rnn 192", "train", {"batch": 12, "length": 25, "source_length": 30}),
            ("rnn 192", "decode", {"batch": 5, "length": 25, "source_length": 30}),
        ]
    return [
        ("gpt-nano", "forward", {"batch": 1, "length": 12}),
        ("gpt-nano", "train", {"batch": 4, "length": 100}),
        ("gpt-nano", "decode", {"batch": 1, "length": 40}),
        ("gpt 384×6", "forward", {"batch": 3, "length": 200}),
        ("gpt 384×6", "train", {"batch": 64, "length": 256}),
        ("gpt 384×6", "decode", {"batch": 48, "length": 3000}),
        ("gpt 384×6", "forward", {"batch": 1, "length": 7000}),
        ("gpt2", "forward", {"batch": 1, "length": 700}),
        ("gpt2", "forward", {"batch": 24, "length": 1000}),
        ("gpt2", "train", {"batch": 12, "length": 1024}),
        ("gpt2", "train", {"batch": 1, "length": 300}),
        ("gpt2", "prefill", {"batch": 6, "length": 1500}),
        ("gpt2", "decode", {"batch": 1, "length": 500}),
        ("gpt2", "decode", {"batch": 90, "length": 1500}),
        ("gpt2", "forward", {"batch": 2, "length": 1500, "kernel": "plain"}),
        ("gpt2-large", "forward", {"batch": 4, "length": 900}),
        ("gpt2-large", "decode", {"batch": 1, "length": 900}),
        ("llama 2048×8", "prefill", {"batch": 1, "length": 6000}),
        ("llama 2048×8", "train", {"batch": 3, "length": 1500}),
        ("llama 2048×8", "decode", {"batch": 1, "length": 5000}),
        ("bert-base", "forward", {"batch": 40, "length": 200}),
        ("bert-base", "train", {"batch": 24, "length": 400}),
        ("transformer-base", "forward", {"batch": 50, "length": 60, "source_length": 70}),
        ("transformer-base", "train", {"batch": 50, "length": 60, "source_length": 70}),
        ("transformer-base", "decode", {"batch": 3, "length": 60, "source_length": 70}),
        ("rnn 512", "forward", {"batch": 50, "length": 60, "source_length": 70}),
        ("rnn 512", "train", {"batch": 50, "length": 60, "source_length": 70}),
        ("rnn 512", "decode", {"batch": 3, "length": 60, "source_length": 70}),
    ]
