"""Models and workload sizes for testing the predicted times."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, load_config, preset
from qkv.cost import Mode, Precision, Workload
from qkv.zoo import shipped_model_folders

LONG_CONTEXTS = (1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a workload whose time is predicted and measured."""

    model: str
    config: ModelConfig
    workload: Workload


def list_cases(kind: str, dtype: Precision) -> Iterator[Case]:
    """Yield the cases for a device of type `cpu` or `cuda`. Their sizes lie between those of the calibration."""
    configs = build_configs(kind)
    sizes = [*_shipped_model_sizes(), *(CPU_SIZES if kind == "cpu" else GPU_SIZES)]
    for model, mode, batch_size, seq_len, *rest in sizes:
        settings: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "mode": Mode(mode)}
        if rest:
            settings["source_len"] = rest[0]
        settings["dtype"] = dtype.training_precision if mode == "train" else dtype
        yield Case(model=model, config=configs[model], workload=Workload(**settings))


def list_long_context_cases(kind: str, dtype: Precision) -> Iterator[Case]:
    """Yield forward passes over long contexts with eager and fused attention.

    Only eager attention allocates n×n matrices.
    """
    d_model = 768 if kind == "cuda" else 128
    config = GPTConfig(vocab_size=512, context_length=4096, d_model=d_model, n_heads=d_model // 64, n_layers=2)
    for n in LONG_CONTEXTS:
        for kernel in ("eager", "fused"):
            workload = Workload(batch_size=1, seq_len=n, mode=Mode.FORWARD, dtype=dtype, kernel=kernel)  # type: ignore[arg-type]
            yield Case(model=f"gpt {d_model}×2, {kernel} attention", config=config, workload=workload)


def build_configs(kind: str) -> dict[str, ModelConfig]:
    """Build the model configs, keyed by name. Dropout is disabled, because it is not part of the estimates."""
    shipped = {name: load_config(folder / "config.json") for name, folder in shipped_model_folders().items()}
    if kind == "cpu":
        llama: dict[str, Any] = {"d_model": 320, "n_heads": 5, "n_layers": 6, "d_ff": 864, "vocab_size": 4096}
        sized: dict[str, ModelConfig] = {
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
    else:
        llama = {"d_model": 2048, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8, "d_ff": 5632, "vocab_size": 32000}
        sized = {
            "gpt-nano": preset("gpt-nano"),
            "gpt2": preset("gpt2", context_length=4096),
            "gpt 384×6": GPTConfig(vocab_size=4096, context_length=8192, d_model=384, n_heads=6, n_layers=6),
            "gpt2-large": preset("gpt2-large"),
            "llama 2048×8": _llama_7b_config(llama),
            "bert-base": preset("bert-base", masked_lm_head=True),
            "transformer-base": preset("transformer-base"),
            "rnn 512": RNNConfig(vocab_size=16000, d_model=512),
        }
    # `qkv embed` does not run the heads.
    shipped["bert"] = shipped["bert"].replace(masked_lm_head=False, next_sentence_head=False, pooler=False)
    return {name: config.replace(dropout=0.0) for name, config in {**shipped, **sized}.items()}


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


def _shipped_model_sizes() -> Iterator[tuple[Any, ...]]:
    """Yield the workloads of `qkv generate`, `embed`, `classify` and `translate` with the shipped models."""
    yield from [
        ("stories", "prefill", 1, 12),
        ("stories", "decode", 1, 100),
        ("stories", "decode", 5, 250),
        ("bert", "forward", 6, 40),
        ("sentiment", "forward", 12, 30),
    ]
    for model in ("es-en", "es-en-rnn"):
        yield from [(model, "prefill", 3, 1, 25), (model, "decode", 3, 20, 25)]


# Each entry contains the model, the mode, the batch size, the sequence length and, for some models, the source length.
CPU_SIZES: list[tuple[Any, ...]] = [
    ("gpt-nano", "decode", 1, 40),
    ("gpt-nano", "forward", 1, 12),
    ("gpt-nano", "train", 2, 24),
    ("gpt 192×4", "forward", 4, 130),
    ("gpt 192×4", "train", 4, 130),
    ("gpt 192×4", "prefill", 1, 300),
    ("gpt 192×4", "decode", 1, 300),
    ("gpt 192×4", "decode", 8, 700),
    ("gpt 192×4", "forward", 1, 1500),
    ("gpt 192×4", "train", 1, 900),
    ("gpt2", "prefill", 1, 100),
    ("gpt2", "decode", 1, 200),
    ("gpt2", "decode", 4, 100),
    ("gpt2", "train", 1, 100),
    ("llama 320×6", "forward", 2, 200),
    ("llama 320×6", "train", 2, 90),
    ("llama 320×6", "prefill", 1, 400),
    ("llama 320×6", "decode", 1, 400),
    ("llama 320×6", "decode", 6, 150),
    ("bert 384×3", "forward", 8, 60),
    ("bert 384×3", "train", 4, 90),
    ("seq2seq 256×3+2", "prefill", 4, 1, 50),
    ("seq2seq 256×3+2", "train", 4, 40, 50),
    ("seq2seq 256×3+2", "decode", 2, 60, 80),
    ("rnn 192", "prefill", 12, 1, 30),
    ("rnn 192", "train", 12, 25, 30),
    ("rnn 192", "decode", 5, 25, 30),
]
GPU_SIZES: list[tuple[Any, ...]] = [
    ("gpt-nano", "forward", 1, 12),
    ("gpt-nano", "train", 4, 100),
    ("gpt-nano", "decode", 1, 40),
    ("gpt 384×6", "forward", 3, 200),
    ("gpt 384×6", "train", 64, 256),
    ("gpt 384×6", "decode", 48, 3000),
    ("gpt 384×6", "forward", 1, 7000),
    ("gpt2", "forward", 24, 1000),
    ("gpt2", "train", 12, 1024),
    ("gpt2", "train", 1, 300),
    ("gpt2", "prefill", 1, 700),
    ("gpt2", "prefill", 6, 1500),
    ("gpt2", "decode", 1, 500),
    ("gpt2", "decode", 4, 200),
    ("gpt2", "decode", 16, 800),
    ("gpt2", "decode", 90, 1500),
    ("gpt2-large", "forward", 4, 900),
    ("gpt2-large", "decode", 1, 900),
    ("llama 2048×8", "prefill", 1, 6000),
    ("llama 2048×8", "train", 3, 1500),
    ("llama 2048×8", "decode", 1, 5000),
    ("bert-base", "forward", 40, 200),
    ("bert-base", "forward", 3, 50),
    ("bert-base", "train", 24, 400),
    ("transformer-base", "prefill", 50, 1, 70),
    ("transformer-base", "train", 50, 60, 70),
    ("transformer-base", "decode", 3, 60, 70),
    ("rnn 512", "prefill", 50, 1, 70),
    ("rnn 512", "train", 50, 60, 70),
    ("rnn 512", "decode", 3, 60, 70),
]
