"""Compare the predicted and measured time of each operation, using timing hooks on the model's modules."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from qkv.cost.prediction import TimePrediction
from qkv.models import Model
from qkv.training.benchmark_steps import Step
from qkv.training.timer import Timer

_LAYER = re.compile(r"\.\d+(?=\.|$)")
_SELF_TIME_NAMES = {"attention": "attention", "cross_attention": "attention", "feed_forward": "activation"}
"""Name of the operation to which a module's time outside its submodules is assigned."""


@dataclass(frozen=True, kw_only=True)
class OperationTiming:
    """The predicted and measured time of one operation in seconds, summed over all layers."""

    name: str
    predicted: float
    measured: float


def compare_operations(model: Model, step: Step, prediction: TimePrediction, timer: Timer) -> list[OperationTiming]:
    """Compare predictions and measurements for the operations of a forward pass that correspond to modules.

    The predicted launch overhead is distributed evenly over all kernel runs.
    """
    measured = _measure_module_self_times(model, step, timer)
    predicted: dict[str, float] = defaultdict(float)
    overhead_per_run = prediction.launch_seconds / sum(operation.runs for operation in prediction.operation_times)
    for operation in prediction.operation_times:
        predicted[_operation_name(operation.part, operation.name)] += (
            operation.seconds + operation.runs * overhead_per_run
        )
    return [
        OperationTiming(name=name, predicted=seconds, measured=measured[name])
        for name, seconds in predicted.items()
        if name in measured and measured[name] > 0
    ]


def _operation_name(part: str, name: str) -> str:
    return part if name in ("norm", "logits") else f"{part}.{name}"


def _measure_module_self_times(model: Model, step: Step, timer: Timer, *, n_runs: int = 5) -> dict[str, float]:
    """Measure the time of each module without its submodules.

    Times are summed over layers, and the result is the minimum of several runs.
    """
    runs = []
    for _ in range(n_runs):
        seconds: dict[str, float] = defaultdict(float)
        hooks = _install_self_time_hooks(model, seconds, timer)
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()
        runs.append(seconds)
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _install_self_time_hooks(
    model: Model, seconds: dict[str, float], timer: Timer
) -> list["torch.utils.hooks.RemovableHandle"]:
    hooks = []
    stack: list[list[float]] = []

    def before(_module: nn.Module, _inputs: object) -> None:
        timer.synchronize()
        stack.append([timer.now(), 0.0])

    for path, module in model.named_modules():
        name = _LAYER.sub("", path)
        kind = _SELF_TIME_NAMES.get(name.rpartition(".")[2])
        is_operation = isinstance(module, nn.Linear) or name.endswith("norm") or name == "unembedding"
        if not is_operation and kind is None:
            continue
        operation = f"{name}.{kind}" if kind else name

        def after(_module: nn.Module, _inputs: object, _output: object, operation: str = operation) -> None:
            timer.synchronize()
            start, in_submodules = stack.pop()
            elapsed = timer.now() - start
            seconds[operation] += elapsed - in_submodules
            if stack:
                stack[-1][1] += elapsed

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return hooks
