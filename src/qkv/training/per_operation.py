"""Predicted and measured, operation by operation: the model's own modules are timed while it runs."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from qkv.cost.prediction import Prediction
from qkv.models import Model
from qkv.training.measuring import Step
from qkv.training.stopwatch import Stopwatch

_LAYER = re.compile(r"\.\d+(?=\.|$)")
_WITHIN = {"attention": "attention", "cross": "attention", "feedforward": "activation"}
"""What a module does itself, besides what its parts do, is named after this operation."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds of one operation in all layers."""

    name: str
    predicted: float
    measured: float


def compare_operations(model: Model, step: Step, prediction: Prediction, watch: Stopwatch) -> list[Compared]:
    """Those that are modules of their own, of a forward pass; each with its share of the launching."""
    measured = _measured(model, step, watch)
    predicted: dict[str, float] = defaultdict(float)
    a_run = prediction.launching / sum(one.runs for one in prediction.spent)
    for one in prediction.spent:
        predicted[_name(one.part, one.name)] += one.seconds + one.runs * a_run
    return [
        Compared(name=name, predicted=seconds, measured=measured[name])
        for name, seconds in predicted.items()
        if name in measured and measured[name] > 0
    ]


def _name(part: str, name: str) -> str:
    return part if name in ("norm", "logits") else f"{part}.{name}"


def _measured(model: Model, step: Step, watch: Stopwatch, *, times: int = 5) -> dict[str, float]:
    """The least of several runs, summed over layers, each module without its parts."""
    runs = []
    for _ in range(times):
        taken: dict[str, float] = defaultdict(float)
        hooks = _watch(model, taken, watch)
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()
        runs.append(taken)
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _watch(model: Model, taken: dict[str, float], watch: Stopwatch) -> list["torch.utils.hooks.RemovableHandle"]:
    hooks = []
    stack: list[list[float]] = []

    def before(_module: nn.Module, _inputs: object) -> None:
        watch.wait()
        stack.append([watch.now(), 0.0])

    for path, module in model.named_modules():
        name = _LAYER.sub("", path)
        kind = _WITHIN.get(name.rpartition(".")[2])
        is_part = isinstance(module, nn.Linear) or name.endswith("norm") or name == "unembedding"
        if not is_part and kind is None:
            continue
        own = f"{name}.{kind}" if kind else name

        def after(_module: nn.Module, _inputs: object, _output: object, own: str = own) -> None:
            watch.wait()
            start, within = stack.pop()
            whole = watch.now() - start
            taken[own] += whole - within
            if stack:
                stack[-1][1] += whole

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return hooks
