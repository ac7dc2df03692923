"""Settings for someone's own pairs, from their size, the time given and the machine's speed."""

from typing import Any

from qkv.config import Recipe
from qkv.training.choosing import SHARE_OF_RATE, kept

SHAPES = ((2, 1, 64, 2), (2, 2, 96, 3), (3, 2, 128, 4), (4, 2, 192, 6), (6, 3, 256, 8), (6, 4, 384, 6), (6, 6, 512, 8))
"""(encoder layers, decoder layers, width, heads), small to large: reading a source is cheap, writing is not."""


def choose_translation(
    files: list[str], *, n_bytes: int, seconds: float, rate: float, is_rnn: bool, target_ending: str | None = None
) -> Recipe:
    """`rate`: FLOP/s of this device's matrix products. Steps are a guess that `fit_steps` makes exact."""
    n_encoder, n_decoder, d_model, n_heads = _shape(n_bytes, flops=seconds * rate * SHARE_OF_RATE)
    model: dict[str, Any] = {"context_length": 512, "d_model": d_model, "dropout": 0.1}
    if is_rnn:
        model |= {"n_encoder_layers": 1 if d_model < 256 else 2, "tie_embeddings": True}
    else:
        model |= {
            "n_encoder_layers": n_encoder, "n_decoder_layers": n_decoder, "n_heads": n_heads, "norm_position": "pre",
            "final_norm": True, "positions": "rotary", "attention_bias": False,
            "init_std": 0.05 if d_model < 256 else 0.02,
        }  # fmt: skip
    small = d_model <= 128
    return Recipe(
        family="rnn" if is_rnn else "seq2seq",
        tokenizer={"vocab_size": 1000 if n_bytes < 300_000 else 4000 if n_bytes < 10_000_000 else 8000},  # type: ignore[arg-type]
        model=model,
        data={"train": tuple(files), "validation_share": _held_out(n_bytes)},  # type: ignore[arg-type]
        pairs={"target_ending": target_ending},  # type: ignore[arg-type]
        training={
            "steps": 1000, "batch_size": 8 if small else 64, "seq_len": 128, "label_smoothing": 0.1,
            "optimizer": "adamw" if is_rnn else "muon", "learning_rate": 3e-3 if small or is_rnn else 2e-3,
            "schedule": "linear", "min_lr_ratio": 0.0, "warmup_steps": 50, "eval_every": 100,
            "keep_checkpoints": kept(d_model),
        },  # type: ignore[arg-type]
    )  # fmt: skip


def _shape(n_bytes: int, *, flops: float) -> tuple[int, int, int, int]:
    """The largest that the time lets see four tokens a parameter, and whose parameters the pairs can fill."""
    chosen = SHAPES[0]
    for n_encoder, n_decoder, d_model, n_heads in SHAPES:
        n_parameters = (12 * n_encoder + 16 * n_decoder) * d_model**2
        if flops / (6 * n_parameters) >= 4 * n_parameters and n_parameters <= 2 * n_bytes:
            chosen = (n_encoder, n_decoder, d_model, n_heads)
    return chosen


def _held_out(n_bytes: int) -> float:
    """A twentieth, and of a large file about two thousand pairs."""
    n_pairs = n_bytes / 70
    return min(0.05, max(0.001, 2000 / max(1.0, n_pairs)))
