"""Loss to better weights: losses, optimizers, schedule, the loop, the run folder, evaluation."""

from qkv.training.choosing import (
    USUAL_MINUTES,
    choose_bert,
    choose_recipe,
    choose_shape,
    fit_steps,
    matmul_rate,
    own_recipe,
    with_steps,
)
from qkv.training.choosing_pairs import choose_translation
from qkv.training.evaluation import Score, evaluate
from qkv.training.family import TrainingData
from qkv.training.pacing import Pace
from qkv.training.prepare import (
    Prepared,
    build_trainer,
    finish_preparing,
    fit_to_time,
    go_on_preparing,
    made_by_another,
    open_run,
    prepare_run,
    preparing,
    write_recipe,
)
from qkv.training.ranks import ALONE, Ranks
from qkv.training.run import Progress, RunFolder
from qkv.training.signals import Stopped, stop_at_once
from qkv.training.trainer import Trainer

__all__ = [
    "ALONE",
    "USUAL_MINUTES",
    "Pace",
    "Prepared",
    "Progress",
    "Ranks",
    "RunFolder",
    "Score",
    "Stopped",
    "Trainer",
    "TrainingData",
    "build_trainer",
    "choose_bert",
    "choose_recipe",
    "choose_shape",
    "choose_translation",
    "evaluate",
    "finish_preparing",
    "fit_steps",
    "fit_to_time",
    "go_on_preparing",
    "made_by_another",
    "matmul_rate",
    "open_run",
    "own_recipe",
    "prepare_run",
    "preparing",
    "stop_at_once",
    "with_steps",
    "write_recipe",
]
