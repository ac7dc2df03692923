"""Settings for someone's own text, from its size, the time given and the machine's speed."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qkv.choices import OptimizerKind, ScheduleKind
from qkv.config import Recipe, TrainingConfig
from qkv.data import find_sources

SHAPES = ((2, 64, 2), (3, 96, 3), (4, 128, 4), (5, 192, 6), (6, 256, 8), (6, 384, 6), (8, 512, 8), (12, 768, 12))
"""(layers, width, heads) to choose from, small to large."""
SHARE_OF_RATE = 0.35
"""What part of the measured matrix rate training a small model reaches."""

FEWEST_BATCHES = 8
"""Of an evaluation: fewer say too little."""
CHECKPOINTS = 12
"""Kept of a small model, for `qkv look --view timeline`: about all that `with_steps` lets a run save."""
FEWEST_STEPS = 20
"""Of a run, however short its time."""
USUAL_MINUTES = 5.0
"""For files of one's own, where neither time nor steps are said."""


def own_recipe(
    files: list[str], choose: Callable[..., Recipe], *, seconds: float, device: torch.device
) -> Recipe:  # fmt: skip
    """A recipe for files of one's own, by `choose_recipe` or its like: what fits them, the time and this device."""
    return choose(
        [str(Path(file).resolve()) for file in files],
        n_bytes=sum(source.size for source in find_sources(files)),
        seconds=seconds,
        rate=matmul_rate(device),
    )


def choose_recipe(files: list[str], *, n_bytes: int, seconds: float, rate: float) -> Recipe:
    """`rate`: FLOP/s of this device's matrix products. Steps are a guess that `fit_steps` makes exact."""
    kind, vocab_size = _tokenizer(n_bytes)
    n_layers, d_model, n_heads = choose_shape(n_bytes=n_bytes, flops=seconds * rate * SHARE_OF_RATE)
    length = 128 if d_model <= 128 else 256
    batch_size = 16 if d_model <= 256 else 64
    model: dict[str, Any] = {
        "context_length": length,
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "positions": "rotary",
        "norm": "rms",
        # Gated, at two thirds of the width: as many parameters, and the Llama family's shape, so that a run's
        # model can be written for others (`qkv convert`).
        "d_ff": 32 * round(8 * d_model / 3 / 32),
        "gated": True,
        "activation": "silu",
        "attention_bias": False,
        "feed_forward_bias": False,
        "dropout": 0.1,
    }
    return Recipe(
        family="gpt",
        tokenizer={"kind": kind, "vocab_size": vocab_size},  # type: ignore[arg-type]
        model=model,
        data={"train": tuple(files), "validation_share": 0.05},  # type: ignore[arg-type]
        training=_training(d_model, batch_size=batch_size, length=length, warmup_steps=50),
    )


def choose_bert(files: list[str], *, n_bytes: int, seconds: float, rate: float, next_sentence: bool) -> Recipe:
    """As `choose_recipe`. The published shape (post-norm, learned positions, GELU), which others can load.

    Its WordPiece is trained by `tokenizers`, which breaks ties by chance: two runs on one text have other vocabularies.
    """
    n_layers, d_model, n_heads = choose_shape(n_bytes=n_bytes, flops=seconds * rate * SHARE_OF_RATE)
    batch_size = 32 if d_model <= 256 else 128
    model = {"context_length": 128, "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "dropout": 0.1}
    size = 2048 if n_bytes < 1_000_000 else 4096 if n_bytes < 30_000_000 else 8192
    return Recipe(
        family="bert",
        tokenizer={"kind": "wordpiece", "vocab_size": size, "lowercase": True},  # type: ignore[arg-type]
        model=model,
        data={"train": tuple(files), "validation_share": 0.05},  # type: ignore[arg-type]
        examples={"next_sentence": next_sentence},  # type: ignore[arg-type]
        training=_training(d_model, batch_size=batch_size, length=128, warmup_steps=100),
    )


def _training(d_model: int, *, batch_size: int, length: int, warmup_steps: int) -> TrainingConfig:
    """Narrower models bear a higher rate; the steps are set later."""
    return TrainingConfig(
        steps=1000,
        batch_size=batch_size,
        seq_len=length,
        optimizer=OptimizerKind.MUON,
        learning_rate=8e-3 if d_model <= 128 else 4e-3 if d_model <= 256 else 2e-3,
        schedule=ScheduleKind.LINEAR,
        min_lr_ratio=0.0,
        warmup_steps=warmup_steps,
        eval_every=100,
        keep_checkpoints=kept(d_model),
    )


def kept(d_model: int) -> int:
    """Checkpoints, which take 12 bytes a parameter each: at width 192, 30 MB."""
    return CHECKPOINTS if d_model <= 192 else 2


def choose_shape(*, n_bytes: int, flops: float) -> tuple[int, int, int]:
    """The largest that the time lets see four tokens a parameter, and whose parameters the text can fill."""
    chosen = SHAPES[0]
    for n_layers, d_model, n_heads in SHAPES:
        n_parameters = 12 * n_layers * d_model**2
        n_tokens = flops / (6 * n_parameters)
        if n_tokens >= 4 * n_parameters and n_parameters <= 5 * n_bytes:
            chosen = (n_layers, d_model, n_heads)
    return chosen


def _tokenizer(n_bytes: int) -> tuple[str, int]:
    """Short texts do not show a long vocabulary often enough to learn it."""
    if n_bytes < 200_000:
        return "char", 1024
    return "bpe", 1024 if n_bytes < 3_000_000 else 2048 if n_bytes < 30_000_000 else 4096


def fit_steps(recipe: Recipe, *, seconds: float, seconds_a_step: float) -> Recipe:
    """The same recipe with as many steps as the time allows."""
    return with_steps(recipe, max(FEWEST_STEPS, steps_within(seconds / seconds_a_step, n_evaluations=11)))


def steps_within(room: float, *, n_evaluations: int) -> int:
    """`room`: steps that the time would hold if nothing else were done; a tenth is left for evaluating and saving.

    Of a short run evaluating takes more: each has `FEWEST_BATCHES` at least.
    """
    return math.floor(min(0.9 * room, 0.95 * room - n_evaluations * FEWEST_BATCHES / 3))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """So many steps, evaluated and saved ten times on the way.

    A validation batch costs a third of a training step, so ten times a sixtieth of the steps is 6 % of the work.
    """
    every = max(1, steps // 10)
    training = recipe.training.replace(
        steps=steps,
        warmup_steps=min(100, steps // 10),
        eval_every=every,
        save_every=every,
        eval_batches=max(FEWEST_BATCHES, steps // 60),
    )
    return recipe.replace(training=training)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large product, measured in about a fifth of a second."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        _wait(device)
        started = time.perf_counter()
        _ = a @ a
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
