"""What starting a step costs when there is next to nothing to compute: real models, very small, one layer and five."""

from collections.abc import Callable
from typing import Any

import torch

from qkv.choices import Kernel, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.calibration import Overhead
from qkv.cost.prediction import PLAIN, launch_name
from qkv.cost.workload import Mode, Precision, Workload
from qkv.training.measuring import Step, gradients_of, loss_of, random_model, step_of
from qkv.training.stopwatch import Stopwatch

FEW, MANY = 1, 5
# Narrow, so that nothing is computed; heads of a usual width, so that torch chooses the kernels it usually does.
_SMALL: dict[str, Any] = {"vocab_size": 64, "context_length": 16, "d_model": 32, "n_heads": 2, "d_head": 64}
_LLAMA = {"positions": PositionKind.ROTARY, "gated": True, "attention_bias": False, "feed_forward_bias": False}


def small_pass(device: torch.device, dtype: Precision) -> Step:
    """A GPT's pass with next to nothing to compute: how fast the machine launches just now."""
    work = Workload(batch=1, length=2, dtype=dtype)
    return step_of(random_model(GPTConfig(**_SMALL, n_layers=MANY), device, dtype), work)


class Launching:
    """Each model in each mode, to be looked at several times with other work in between.

    Starting is the work of one CPU core, and a machine shared with others may have it at half speed, for a second or
    for ten. So the least of many short looks counts.
    """

    def __init__(self, watch: Stopwatch, *, dtype: Precision, training_dtype: Precision) -> None:
        self._watch = watch
        self._steps: dict[str, list[Step]] = {}
        self._least: dict[str, list[float]] = {}
        known = _models()
        for configs, kernel in [*((one, Kernel.FUSED) for one in known), (known[0], Kernel.PLAIN)]:
            for mode in (Mode.FORWARD, Mode.TRAIN, Mode.PREFILL, Mode.DECODE):
                if isinstance(configs[0], BERTConfig) and mode in (Mode.PREFILL, Mode.DECODE):
                    continue
                precision = training_dtype if mode is Mode.TRAIN else dtype
                work = Workload(batch=1, length=2, mode=mode, dtype=precision, kernel=kernel)
                self._steps |= _steps(configs, watch, work)

    def look(self) -> None:
        for name, steps in self._steps.items():
            is_warm = name in self._least
            seconds = [self._watch.whole(step, spend=self._watch.spend / 2, is_warm=is_warm) for step in steps]
            self._least[name] = [min(pair) for pair in zip(seconds, self._least.get(name, seconds), strict=True)]

    def overheads(self) -> dict[str, Overhead]:
        """By name and mode, as `Calibration.launch` looks for them."""
        return {name: _overhead(seconds) for name, seconds in self._least.items()}


def _models() -> list[list[ModelConfig]]:
    """Alike but for their layers: the first is the smallest, each other has MANY layers of one stack."""
    one_stack: list[Callable[[int], ModelConfig]] = [
        lambda n: GPTConfig(**_SMALL, n_layers=n),
        lambda n: GPTConfig(**_SMALL, **_LLAMA, norm="rms", activation="silu", n_layers=n),  # type: ignore[arg-type]
        lambda n: BERTConfig(**_SMALL, n_layers=n, masked_word_head=True, pooler=False),
    ]
    two_stacks: list[Callable[[int, int], ModelConfig]] = [
        lambda m, n: Seq2SeqConfig(**_SMALL, n_encoder_layers=m, n_decoder_layers=n),
        lambda m, n: RNNConfig(vocab_size=64, d_model=32, n_encoder_layers=m, n_decoder_layers=n),
    ]
    return [
        *([make(FEW), make(MANY)] for make in one_stack),
        *([both(FEW, FEW), both(MANY, FEW), both(FEW, MANY)] for both in two_stacks),
    ]


def _steps(configs: list[ModelConfig], watch: Stopwatch, work: Workload) -> dict[str, list[Step]]:
    """By `launch_name`, or as `plain`, and what of a step it is."""
    mode = work.mode
    name = PLAIN if work.kernel is Kernel.PLAIN else launch_name(configs[0])
    models = [random_model(config, watch.device, work.dtype) for config in configs]
    made = {f"{name}.{mode.value}": [step_of(model, work) for model in models]}
    if mode is Mode.TRAIN:
        made[f"{name}.train_forward"] = [loss_of(model, work) for model in models]
        made[f"{name}.train_gradients"] = [gradients_of(model, work) for model in models]
    return made


def _overhead(seconds: list[float]) -> Overhead:
    layers = [max(0.0, (other - seconds[0]) / (MANY - FEW)) for other in seconds[1:]]
    return Overhead(
        once=max(0.0, seconds[0] - FEW * sum(layers)),
        layer=layers[0],
        second_layer=layers[1] if len(layers) > 1 else 0.0,
    )
