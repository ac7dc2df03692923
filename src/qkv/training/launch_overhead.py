"""Measure the launch overhead with tiny models, whose steps consist almost entirely of kernel launches."""

from collections.abc import Callable
from typing import Any

import torch

from qkv.choices import AttentionKernel, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.calibration import LaunchOverhead
from qkv.cost.prediction import EAGER_FAMILY, launch_overhead_family
from qkv.cost.workload import Mode, Precision, Workload
from qkv.training.benchmark_steps import (
    Step,
    build_loss,
    build_loss_and_backward_step,
    build_random_model,
    configure_model_and_build_step,
)
from qkv.training.timer import Timer

FEW_LAYERS, MANY_LAYERS = 1, 5
# Narrow models require almost no computation. The heads have a typical width so that torch selects the usual kernels.
_TINY_CONFIG: dict[str, Any] = {"vocab_size": 64, "context_length": 16, "d_model": 32, "n_heads": 2, "d_head": 64}
_LLAMA_OPTIONS = {"positions": PositionKind.ROTARY, "gated": True, "attention_bias": False, "feed_forward_bias": False}


def build_tiny_forward_pass(device: torch.device, dtype: Precision) -> Step:
    """Build a forward pass of a tiny GPT whose run time is the current launch overhead of the machine."""
    work = Workload(batch_size=1, seq_len=2, dtype=dtype)
    return configure_model_and_build_step(
        build_random_model(GPTConfig(**_TINY_CONFIG, n_layers=MANY_LAYERS), device, dtype), work
    )


class LaunchOverheadBenchmark:
    """A benchmark that measures the launch overhead of each model family in each mode.

    Launching kernels keeps one CPU core busy, and other processes may slow this core down for seconds at a time. Each
    overhead is therefore the minimum of many short measurements, which are spread over the calibration.
    """

    def __init__(self, timer: Timer, *, dtype: Precision, training_dtype: Precision) -> None:
        self._timer = timer
        self._steps: dict[str, list[Step]] = {}
        self._fastest: dict[str, list[float]] = {}
        config_groups = _configs_varying_n_layers()
        for configs, kernel in [
            *((configs, AttentionKernel.FUSED) for configs in config_groups),
            (config_groups[0], AttentionKernel.EAGER),
        ]:
            for mode in (Mode.FORWARD, Mode.TRAIN, Mode.PREFILL, Mode.DECODE):
                if isinstance(configs[0], BERTConfig) and mode in (Mode.PREFILL, Mode.DECODE):
                    continue
                precision = training_dtype if mode is Mode.TRAIN else dtype
                work = Workload(batch_size=1, seq_len=2, mode=mode, dtype=precision, kernel=kernel)
                self._steps |= _build_steps_by_family_and_mode(configs, timer, work)

    def measure_and_keep_fastest(self) -> None:
        """Measure every step once more and keep the minimum time."""
        for name, steps in self._steps.items():
            is_warm = name in self._fastest
            seconds = [
                self._timer.measure_lower_quartile_latency(
                    step, seconds=self._timer.seconds_per_measurement / 2, is_warm=is_warm
                )
                for step in steps
            ]
            self._fastest[name] = [min(pair) for pair in zip(seconds, self._fastest.get(name, seconds), strict=True)]

    def overheads(self) -> dict[str, LaunchOverhead]:
        """Return the overheads for each family and mode, with the keys that `Calibration` expects."""
        return {name: _fit_overhead(seconds) for name, seconds in self._fastest.items()}


def _configs_varying_n_layers() -> list[list[ModelConfig]]:
    """Return groups of configs that differ only in the number of layers.

    The first config in each group is the smallest. Each of the other configs has MANY_LAYERS in one of its stacks.
    """
    one_stack: list[Callable[[int], ModelConfig]] = [
        lambda n: GPTConfig(**_TINY_CONFIG, n_layers=n),
        lambda n: GPTConfig(**_TINY_CONFIG, **_LLAMA_OPTIONS, norm="rms", activation="silu", n_layers=n),  # type: ignore[arg-type]
        lambda n: BERTConfig(**_TINY_CONFIG, n_layers=n, masked_lm_head=True, pooler=False),
    ]
    two_stacks: list[Callable[[int, int], ModelConfig]] = [
        lambda m, n: Seq2SeqConfig(**_TINY_CONFIG, n_encoder_layers=m, n_decoder_layers=n),
        lambda m, n: RNNConfig(vocab_size=64, d_model=32, n_encoder_layers=m, n_decoder_layers=n),
    ]
    return [
        *([make(FEW_LAYERS), make(MANY_LAYERS)] for make in one_stack),
        *(
            [make(FEW_LAYERS, FEW_LAYERS), make(MANY_LAYERS, FEW_LAYERS), make(FEW_LAYERS, MANY_LAYERS)]
            for make in two_stacks
        ),
    ]


def _build_steps_by_family_and_mode(configs: list[ModelConfig], timer: Timer, work: Workload) -> dict[str, list[Step]]:
    """Build the steps to measure, keyed by launch family and mode."""
    mode = work.mode
    name = EAGER_FAMILY if work.kernel is AttentionKernel.EAGER else launch_overhead_family(configs[0])
    models = [build_random_model(config, timer.device, work.dtype) for config in configs]
    steps = {f"{name}.{mode.value}": [configure_model_and_build_step(model, work) for model in models]}
    if mode is Mode.TRAIN:
        steps[f"{name}.train_forward"] = [build_loss(model, work) for model in models]
        steps[f"{name}.train_gradients"] = [build_loss_and_backward_step(model, work) for model in models]
    return steps


def _fit_overhead(seconds: list[float]) -> LaunchOverhead:
    layers = [max(0.0, (other - seconds[0]) / (MANY_LAYERS - FEW_LAYERS)) for other in seconds[1:]]
    return LaunchOverhead(
        base=max(0.0, seconds[0] - FEW_LAYERS * sum(layers)),
        per_layer=layers[0],
        per_decoder_layer=layers[1] if len(layers) > 1 else 0.0,
    )
