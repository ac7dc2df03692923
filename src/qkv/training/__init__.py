"""Loss to better weights: losses, optimizers, schedule, the loop, the run folder, evaluation."""

from qkv.training.choosing import choose_recipe, choose_shape, fit_steps, matmul_rate
from qkv.training.evaluation import Score, evaluate
from qkv.training.prepare import Prepared, build_trainer, open_run, prepare_run
from qkv.training.run import Progress, RunFolder
from qkv.training.trainer import Trainer, TrainingData

__all__ = [
    "Prepared",
    "Progress",
    "RunFolder",
    "Score",
    "Trainer",
    "TrainingData",
    "build_trainer",
    "choose_recipe",
    "choose_shape",
    "evaluate",
    "fit_steps",
    "matmul_rate",
    "open_run",
    "prepare_run",
]
