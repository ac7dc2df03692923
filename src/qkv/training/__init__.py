"""Training objectives, optimizers, schedules, the training loop, run folders and evaluation."""

from qkv.training.checkpoint import RunFolder, TrainingProgress
from qkv.training.distributed import SINGLE_PROCESS, Distributed, SignalInterrupt, raise_on_stop_signals
from qkv.training.family import TrainingData
from qkv.training.loop import EvaluationResult, Trainer, evaluate
from qkv.training.preparation import (
    PreparedRun,
    build_trainer,
    fit_run_to_time,
    load_preparation_inputs,
    open_run,
    open_shared_run,
    prepare_run,
    resume_preparation,
    write_fingerprints_and_final_recipe,
    write_recipe,
)
from qkv.training.recipe_selection import (
    DEFAULT_MINUTES,
    TimeBudgetReplanner,
    auto_recipe,
    choose_bert_recipe_except_steps,
    choose_gpt_recipe_except_steps,
    choose_model_size,
    choose_translation_recipe_except_steps,
    fit_steps_to_time,
    measure_matmul_flops,
    with_steps_and_scaled_intervals,
)

__all__ = [
    "DEFAULT_MINUTES",
    "SINGLE_PROCESS",
    "Distributed",
    "EvaluationResult",
    "PreparedRun",
    "RunFolder",
    "SignalInterrupt",
    "TimeBudgetReplanner",
    "Trainer",
    "TrainingData",
    "TrainingProgress",
    "auto_recipe",
    "build_trainer",
    "choose_bert_recipe_except_steps",
    "choose_gpt_recipe_except_steps",
    "choose_model_size",
    "choose_translation_recipe_except_steps",
    "evaluate",
    "fit_run_to_time",
    "fit_steps_to_time",
    "load_preparation_inputs",
    "measure_matmul_flops",
    "open_run",
    "open_shared_run",
    "prepare_run",
    "raise_on_stop_signals",
    "resume_preparation",
    "with_steps_and_scaled_intervals",
    "write_fingerprints_and_final_recipe",
    "write_recipe",
]
