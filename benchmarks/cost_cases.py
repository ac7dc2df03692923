"""Models and workload sizes for testing the predicted times."""

from typing import Any

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, preset


def build_configs(kind: str) -> dict[str, ModelConfig]:
    """Build model configs, keyed by name, whose sizes lie between the grid points of the calibration."""
    if kind == "cpu":
        llama: dict[str, Any] = {"d_model": 320, "n_heads": 5, "n_layers": 6, "d_ff": 864, "vocab_size": 4096}
        return {
            "gpt-nano": preset("gpt-nano"),
            "gpt 192×4": GPTConfig(vocab_size=2003, context_length=4096, d_model=192, n_heads=3, n_layers=4),
            "gpt2": preset("gpt2"),
            "llama 320×6": _llama_7b_config(llama),
            "bert 384×3": BERTConfig(
                vocab_size=8000, context_length=512, d_model=384, n_heads=6, n_layers=3, masked_lm_head=True
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
        "llama 2048×8": _llama_7b_config(llama),
        "bert-base": preset("bert-base", masked_lm_head=True),
        "transformer-base": preset("transformer-base", dropout=0.0),
        "rnn 512": RNNConfig(vocab_size=16000, d_model=512),
    }


def _llama_7b_config(shape: dict[str, Any]) -> GPTConfig:
    return GPTConfig(
        context_length=8192,
        positions="rotary",
        norm="rms",
        activation="silu",
        gated=True,
        attention_bias=False,
        feed_forward_bias=False,
        tie_embeddings=False,
        **shape,
    )  # type: ignore[arg-type]


def workload_sizes(kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return a tuple of the model name, the mode, and the batch size and lengths for every point."""
    if kind == "cpu":
        return [
            ("gpt-nano", "decode", {"batch_size": 1, "seq_len": 40}),
            ("gpt-nano", "forward", {"batch_size": 1, "seq_len": 12}),
            ("gpt-nano", "train", {"batch_size": 2, "seq_len": 24}),
            ("gpt 192×4", "forward", {"batch_size": 4, "seq_len": 130}),
            ("gpt 192×4", "train", {"batch_size": 4, "seq_len": 130}),
            ("gpt 192×4", "prefill", {"batch_size": 1, "seq_len": 300}),
            ("gpt 192×4", "decode", {"batch_size": 1, "seq_len": 300}),
            ("gpt 192×4", "decode", {"batch_size": 8, "seq_len": 700}),
            ("gpt 192×4", "forward", {"batch_size": 1, "seq_len": 1500}),
            ("gpt 192×4", "forward", {"batch_size": 1, "seq_len": 700, "kernel": "eager"}),
            ("gpt 192×4", "train", {"batch_size": 1, "seq_len": 900}),
            ("gpt2", "forward", {"batch_size": 1, "seq_len": 100}),
            ("gpt2", "decode", {"batch_size": 1, "seq_len": 200}),
            ("gpt2", "train", {"batch_size": 1, "seq_len": 100}),
            ("llama 320×6", "forward", {"batch_size": 2, "seq_len": 200}),
            ("llama 320×6", "train", {"batch_size": 2, "seq_len": 90}),
            ("llama 320×6", "prefill", {"batch_size": 1, "seq_len": 400}),
            ("llama 320×6", "decode", {"batch_size": 1, "seq_len": 400}),
            ("llama 320×6", "decode", {"batch_size": 6, "seq_len": 150}),
            ("bert 384×3", "forward", {"batch_size": 8, "seq_len": 60}),
            ("bert 384×3", "train", {"batch_size": 4, "seq_len": 90}),
            ("seq2seq 256×3+2", "forward", {"batch_size": 4, "seq_len": 40, "source_len": 50}),
            ("seq2seq 256×3+2", "train", {"batch_size": 4, "seq_len": 40, "source_len": 50}),
            ("seq2seq 256×3+2", "decode", {"batch_size": 2, "seq_len": 60, "source_len": 80}),
            ("rnn 192", "forward", {"batch_size": 12, "seq_len": 25, "source_len": 30}),
            ("rnn 192", "train", {"batch_size": 12, "seq_len": 25, "source_len": 30}),
            ("rnn 192", "decode", {"batch_size": 5, "seq_len": 25, "source_len": 30}),
        ]
    return [
        ("gpt-nano", "forward", {"batch_size": 1, "seq_len": 12}),
        ("gpt-nano", "train", {"batch_size": 4, "seq_len": 100}),
        ("gpt-nano", "decode", {"batch_size": 1, "seq_len": 40}),
        ("gpt 384×6", "forward", {"batch_size": 3, "seq_len": 200}),
        ("gpt 384×6", "train", {"batch_size": 64, "seq_len": 256}),
        ("gpt 384×6", "decode", {"batch_size": 48, "seq_len": 3000}),
        ("gpt 384×6", "forward", {"batch_size": 1, "seq_len": 7000}),
        ("gpt2", "forward", {"batch_size": 1, "seq_len": 700}),
        ("gpt2", "forward", {"batch_size": 24, "seq_len": 1000}),
        ("gpt2", "train", {"batch_size": 12, "seq_len": 1024}),
        ("gpt2", "train", {"batch_size": 1, "seq_len": 300}),
        ("gpt2", "prefill", {"batch_size": 6, "seq_len": 1500}),
        ("gpt2", "decode", {"batch_size": 1, "seq_len": 500}),
        ("gpt2", "decode", {"batch_size": 90, "seq_len": 1500}),
        ("gpt2", "forward", {"batch_size": 2, "seq_len": 1500, "kernel": "eager"}),
        ("gpt2-large", "forward", {"batch_size": 4, "seq_len": 900}),
        ("gpt2-large", "decode", {"batch_size": 1, "seq_len": 900}),
        ("llama 2048×8", "prefill", {"batch_size": 1, "seq_len": 6000}),
        ("llama 2048×8", "train", {"batch_size": 3, "seq_len": 1500}),
        ("llama 2048×8", "decode", {"batch_size": 1, "seq_len": 5000}),
        ("bert-base", "forward", {"batch_size": 40, "seq_len": 200}),
        ("bert-base", "train", {"batch_size": 24, "seq_len": 400}),
        ("transformer-base", "forward", {"batch_size": 50, "seq_len": 60, "source_len": 70}),
        ("transformer-base", "train", {"batch_size": 50, "seq_len": 60, "source_len": 70}),
        ("transformer-base", "decode", {"batch_size": 3, "seq_len": 60, "source_len": 70}),
        ("rnn 512", "forward", {"batch_size": 50, "seq_len": 60, "source_len": 70}),
        ("rnn 512", "train", {"batch_size": 50, "seq_len": 60, "source_len": 70}),
        ("rnn 512", "decode", {"batch_size": 3, "seq_len": 60, "source_len": 70}),
    ]
