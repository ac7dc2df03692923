"""Select a translation recipe automatically based on the size of the pairs, the available time and the device speed."""

from typing import Any

from qkv.config import Recipe
from qkv.training.recipe_selection import TRAINING_EFFICIENCY, checkpoints_to_keep

TRANSLATION_SIZES = (
    (2, 1, 64, 2),
    (2, 2, 96, 3),
    (3, 2, 128, 4),
    (4, 2, 192, 6),
    (6, 3, 256, 8),
    (6, 4, 384, 6),
    (6, 6, 512, 8),
)
"""Model sizes (encoder layers, decoder layers, d_model, n_heads), from smallest to largest.

The models have at least as many encoder layers as decoder layers because the encoder runs once per sentence, whereas
the decoder runs once per token.
"""


def choose_translation_recipe_except_steps(
    files: list[str],
    *,
    n_bytes: int,
    seconds: float,
    flops_per_second: float,
    is_rnn: bool,
    target_suffix: str | None = None,
) -> Recipe:
    """Choose a translation recipe. `flops_per_second` is the matmul throughput of the device.

    The number of steps is provisional. `fit_steps_to_time` replaces it once the time per step is known.
    """
    n_encoder, n_decoder, d_model, n_heads = _choose_encoder_decoder_depths_width_heads(
        n_bytes, flops=seconds * flops_per_second * TRAINING_EFFICIENCY
    )
    model: dict[str, Any] = {"context_length": 512, "d_model": d_model, "dropout": 0.1}
    if is_rnn:
        model |= {"n_encoder_layers": 1 if d_model < 256 else 2, "tie_embeddings": True}
    else:
        model |= {
            "n_encoder_layers": n_encoder,
            "n_decoder_layers": n_decoder,
            "n_heads": n_heads,
            "norm_position": "pre",
            "final_norm": True,
            "positions": "rotary",
            "attention_bias": False,
            "init_std": 0.05 if d_model < 256 else 0.02,
        }
    is_small = d_model <= 128
    return Recipe(
        family="rnn" if is_rnn else "seq2seq",
        tokenizer={"vocab_size": 1000 if n_bytes < 300_000 else 4000 if n_bytes < 10_000_000 else 8000},  # type: ignore[arg-type]
        model=model,
        data={"train": tuple(files), "validation_fraction": _validation_fraction(n_bytes)},  # type: ignore[arg-type]
        pairs={"target_suffix": target_suffix},  # type: ignore[arg-type]
        training={
            "steps": 1000,
            "batch_size": 8 if is_small else 64,
            "seq_len": 128,
            "label_smoothing": 0.1,
            "optimizer": "adamw" if is_rnn else "muon",
            "learning_rate": 3e-3 if is_small or is_rnn else 2e-3,
            "schedule": "linear",
            "min_lr_ratio": 0.0,
            "warmup_steps": 50,
            "eval_every": 100,
            "keep_checkpoints": checkpoints_to_keep(d_model),
        },  # type: ignore[arg-type]
    )


def _choose_encoder_decoder_depths_width_heads(n_bytes: int, *, flops: float) -> tuple[int, int, int, int]:
    """Choose the largest model size that suits the amount of data and compute.

    The compute suffices to train on four tokens per parameter. The model has at most two parameters per byte of text.
    """
    chosen = TRANSLATION_SIZES[0]
    for n_encoder, n_decoder, d_model, n_heads in TRANSLATION_SIZES:
        n_parameters = (12 * n_encoder + 16 * n_decoder) * d_model**2
        if flops / (6 * n_parameters) >= 4 * n_parameters and n_parameters <= 2 * n_bytes:
            chosen = (n_encoder, n_decoder, d_model, n_heads)
    return chosen


def _validation_fraction(n_bytes: int) -> float:
    """Return the fraction of pairs to hold out for validation: 5 %, or about 2000 pairs for a large file."""
    n_pairs = n_bytes / 70
    return min(0.05, max(0.001, 2000 / max(1.0, n_pairs)))
