"""Choose a recipe for given data and training time, and adjust its number of steps during the run."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv.choices import OptimizerKind, ScheduleKind
from qkv.config import Recipe, TrainingConfig
from qkv.data import parse_text_sources
from qkv.training.checkpoint import TrainingProgress
from qkv.training.distributed import Distributed


class ModelSize(NamedTuple):
    """The depth, width and number of heads of a model."""

    n_layers: int
    d_model: int
    n_heads: int


MODEL_SIZES = [
    ModelSize(*size)
    for size in ((2, 64, 2), (3, 96, 3), (4, 128, 4), (5, 192, 6), (6, 256, 8), (6, 384, 6), (8, 512, 8), (12, 768, 12))
]
"""Available model sizes, from smallest to largest."""
TRAINING_EFFICIENCY = 0.35
"""Fraction of the measured matmul throughput that is reached when training a small model."""

MIN_EVAL_BATCHES = 8
"""Minimum number of batches per evaluation. With fewer batches, the loss would be noisy."""
SMALL_MODEL_CHECKPOINTS = 12
"""Number of checkpoints to keep for a small model. The checkpoints are used by `qkv inspect --view timeline`. This
number includes nearly all checkpoints that `with_steps_and_scaled_intervals` saves."""
MIN_STEPS = 20
"""Minimum number of steps of a run, regardless of the available time."""
DEFAULT_MINUTES = 5.0
"""Training time in minutes if neither a time nor a number of steps is specified."""


def auto_recipe(files: list[str], choose: Callable[..., Recipe], *, seconds: float, device: torch.device) -> Recipe:
    """Choose a recipe for the files with `choose`.

    The argument `choose` is `choose_gpt_recipe_except_steps` or a function with the same interface. The recipe depends
    on the total size of the files, the available time and the matmul throughput of the device.
    """
    return choose(
        [str(Path(file).resolve()) for file in files],
        n_bytes=sum(source.size for source in parse_text_sources(files)),
        seconds=seconds,
        flops_per_second=measure_matmul_flops(device),
    )


def choose_gpt_recipe_except_steps(
    files: list[str], *, n_bytes: int, seconds: float, flops_per_second: float
) -> Recipe:
    """Choose a GPT recipe. `flops_per_second` is the matmul throughput of the device.

    The number of steps is provisional. `fit_steps_to_time` replaces it once the time per step is known.
    """
    kind, vocab_size = _choose_tokenizer(n_bytes)
    n_layers, d_model, n_heads = choose_model_size(
        n_bytes=n_bytes, flops=seconds * flops_per_second * TRAINING_EFFICIENCY
    )
    seq_len = 128 if d_model <= 128 else 256
    batch_size = 16 if d_model <= 256 else 64
    model: dict[str, Any] = {
        "context_length": seq_len,
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "positions": "rotary",
        "norm": "rms",
        # A gated feed-forward layer of width 8/3·d_model has as many parameters as a plain one of width 4·d_model. The
        # resulting model has the architecture of Llama, which `qkv convert` can export.
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
        data={"train": tuple(files), "validation_fraction": 0.05},  # type: ignore[arg-type]
        training=_training_config_with_placeholder_steps(
            d_model, batch_size=batch_size, seq_len=seq_len, warmup_steps=50
        ),
    )


def choose_bert_recipe_except_steps(
    files: list[str], *, n_bytes: int, seconds: float, flops_per_second: float, next_sentence: bool
) -> Recipe:
    """Choose a BERT recipe that uses the published architecture, which other libraries can load.

    See `choose_gpt_recipe_except_steps`. The WordPiece vocabulary is trained by the `tokenizers` library, which breaks
    ties randomly. Two runs on the same text may therefore have different vocabularies.
    """
    n_layers, d_model, n_heads = choose_model_size(
        n_bytes=n_bytes, flops=seconds * flops_per_second * TRAINING_EFFICIENCY
    )
    batch_size = 32 if d_model <= 256 else 128
    model = {"context_length": 128, "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "dropout": 0.1}
    vocab_size = 2048 if n_bytes < 1_000_000 else 4096 if n_bytes < 30_000_000 else 8192
    return Recipe(
        family="bert",
        tokenizer={"kind": "wordpiece", "vocab_size": vocab_size, "lowercase": True},  # type: ignore[arg-type]
        model=model,
        data={"train": tuple(files), "validation_fraction": 0.05},  # type: ignore[arg-type]
        masking={"next_sentence": next_sentence},  # type: ignore[arg-type]
        training=_training_config_with_placeholder_steps(d_model, batch_size=batch_size, seq_len=128, warmup_steps=100),
    )


def _training_config_with_placeholder_steps(
    d_model: int, *, batch_size: int, seq_len: int, warmup_steps: int
) -> TrainingConfig:
    """Return training settings based on the model width.

    Narrow models tolerate a higher learning rate. The number of steps is provisional.
    """
    return TrainingConfig(
        steps=1000,
        batch_size=batch_size,
        seq_len=seq_len,
        optimizer=OptimizerKind.MUON,
        learning_rate=8e-3 if d_model <= 128 else 4e-3 if d_model <= 256 else 2e-3,
        schedule=ScheduleKind.LINEAR,
        min_lr_ratio=0.0,
        warmup_steps=warmup_steps,
        eval_every=100,
        keep_checkpoints=checkpoints_to_keep(d_model),
    )


def checkpoints_to_keep(d_model: int) -> int:
    """Return how many checkpoints to keep based on the model width.

    Each checkpoint takes 12 bytes per parameter (30 MB at d_model=192).
    """
    return SMALL_MODEL_CHECKPOINTS if d_model <= 192 else 2


def choose_model_size(*, n_bytes: int, flops: float) -> ModelSize:
    """Choose the largest model size that suits the amount of data and compute.

    The compute suffices to train on four tokens per parameter. The model has at most five parameters per byte of text.
    """
    chosen = MODEL_SIZES[0]
    for size in MODEL_SIZES:
        n_parameters = 12 * size.n_layers * size.d_model**2
        n_tokens = flops / (6 * n_parameters)
        if n_tokens >= 4 * n_parameters and n_parameters <= 5 * n_bytes:
            chosen = size
    return chosen


def _choose_tokenizer(n_bytes: int) -> tuple[str, int]:
    """Choose the tokenizer and its vocabulary size.

    Short texts get small vocabularies because models do not learn rare tokens.
    """
    if n_bytes < 200_000:
        return "char", 1024
    return "bpe", 1024 if n_bytes < 3_000_000 else 2048 if n_bytes < 30_000_000 else 4096


def fit_steps_to_time(recipe: Recipe, *, seconds: float, seconds_per_step: float) -> Recipe:
    """Set the number of training steps so that the run takes about `seconds`."""
    return with_steps_and_scaled_intervals(
        recipe, max(MIN_STEPS, steps_in_budget(seconds / seconds_per_step, n_evaluations=11))
    )


def steps_in_budget(n_affordable: float, *, n_evaluations: int) -> int:
    """Return how many training steps to plan if `n_affordable` steps would fill the available time.

    Of this time, 10 % is reserved for evaluation and checkpoints. Short runs reserve more because each evaluation has
    at least `MIN_EVAL_BATCHES` batches.
    """
    return math.floor(min(0.9 * n_affordable, 0.95 * n_affordable - n_evaluations * MIN_EVAL_BATCHES / 3))


def with_steps_and_scaled_intervals(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with the given number of steps and ten evaluations and checkpoints.

    A validation batch costs a third as much as a training step, so ten evaluations of steps/60 batches are 6 % of the
    work.
    """
    eval_every = max(1, steps // 10)
    training = recipe.training.replace(
        steps=steps,
        warmup_steps=min(100, steps // 10),
        eval_every=eval_every,
        save_every=eval_every,
        eval_batches=max(MIN_EVAL_BATCHES, steps // 60),
    )
    return recipe.replace(training=training)


def measure_matmul_flops(device: torch.device) -> float:
    """Measure the FLOP/s of a large matmul, which takes about 0.2 seconds."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        _synchronize(device)
        started = time.perf_counter()
        _ = a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


REPLANS_PER_RUN = 10
"""Number of times that the number of steps is recalculated in a run with constant throughput."""
REPLAN_TOLERANCE = 0.1
"""Minimum relative difference for changing the number of steps."""


class TimeBudgetReplanner:
    """A replanner that adjusts the number of steps so that the run takes `seconds` from now.

    A new number of steps takes effect at a checkpoint, and `on_replan` must save the new config before the next step.
    The saved recipe therefore always matches the training, and a resumed run gives the same results.
    """

    def __init__(
        self,
        seconds: float,
        *,
        on_replan: Callable[[TrainingConfig], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.on_replan = on_replan
        self._seconds = seconds
        self._clock = clock
        self._started = self._last_replan = clock()
        self._reference: TrainingProgress | None = None

    def replan(
        self, config: TrainingConfig, progress: TrainingProgress, distributed: Distributed
    ) -> TrainingConfig | None:
        """Return a config with a new number of steps, or None if the number does not change.

        Rank 0 measures the time.
        """
        steps = int(distributed.broadcast_from_rank0(lambda: self._replan_total_steps(config, progress)))
        return None if steps == config.steps else record_replan(config, at_step=progress.step, steps=steps)

    def _replan_total_steps(self, config: TrainingConfig, progress: TrainingProgress) -> int:
        if self._reference is None:
            # The first step is not timed because it also allocates memory and compiles.
            self._reference = progress if progress.step else None
            return config.steps
        n_steps, now = progress.step - self._reference.step, self._clock()
        is_due = n_steps >= config.steps / REPLANS_PER_RUN or now - self._last_replan >= self._seconds / REPLANS_PER_RUN
        if n_steps == 0 or not is_due or progress.step >= config.steps:
            return config.steps
        seconds_per_step = (progress.seconds - self._reference.seconds) / n_steps
        self._reference, self._last_replan = progress, now
        n_affordable = (self._seconds - (now - self._started)) / max(seconds_per_step, 1e-9)
        remaining = steps_in_budget(n_affordable, n_evaluations=(config.steps - progress.step) // config.eval_every + 1)
        steps = max(progress.step + max(1, remaining), MIN_STEPS)
        return steps if abs(steps - config.steps) > REPLAN_TOLERANCE * config.steps else config.steps


def record_replan(config: TrainingConfig, *, at_step: int, steps: int) -> TrainingConfig:
    """Return the config with a new number of steps that takes effect at step `at_step`.

    Evaluations may become less frequent, but never more frequent.
    """
    eval_every = max(config.eval_every, steps // 10)
    return config.replace(
        steps=steps,
        replans=(*config.replans, (at_step, config.steps)),
        eval_every=eval_every,
        save_every=max(config.save_every, eval_every),
    )
