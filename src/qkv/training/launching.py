"""What starting a step costs when there is next to nothing to compute: real models, very small, one layer and five."""

from collections.abc import Callable
from typing import Any

from qkv.choices import PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.calibration import Overhead
from qkv.cost.prediction import launch_name
from qkv.cost.workload import Mode, Precision, Workload
from qkv.training.measuring import loss_of, random_model, step_of
from qkv.training.stopwatch import Stopwatch

FEW, MANY = 1, 5
_SMALL: dict[str, Any] = {"vocabulary_size": 64, "context_length": 16, "d_model": 32, "n_heads": 2}
_LLAMA = {"positions": PositionKind.ROTARY, "gated": True, "attention_bias": False, "feedforward_bias": False}


def overheads(watch: Stopwatch, *, dtype: Precision, training_dtype: Precision) -> dict[str, Overhead]:
    """By name and mode, as `Calibration.launch` looks for them."""
    one_stack: list[Callable[[int], ModelConfig]] = [
        lambda n: GPTConfig(**_SMALL, n_layers=n),
        lambda n: GPTConfig(**_SMALL, **_LLAMA, norm="rms", activation="silu", n_layers=n),  # type: ignore[arg-type]
        lambda n: BERTConfig(**_SMALL, n_layers=n, masked_word_head=True, pooler=False),
    ]
    two_stacks: list[Callable[[int, int], ModelConfig]] = [
        lambda m, n: Seq2SeqConfig(**_SMALL, n_encoder_layers=m, n_decoder_layers=n),
        lambda m, n: RNNConfig(vocabulary_size=64, d_model=32, n_encoder_layers=m, n_decoder_layers=n),
    ]
    found = {}
    for make in one_stack:
        found |= _differences([make(FEW), make(MANY)], watch, dtype, training_dtype)
    for both in two_stacks:
        found |= _differences([both(FEW, FEW), both(MANY, FEW), both(FEW, MANY)], watch, dtype, training_dtype)
    return found


def _differences(
    configs: list[ModelConfig], watch: Stopwatch, dtype: Precision, training_dtype: Precision
) -> dict[str, Overhead]:
    """The first is the smallest; each other has MANY layers of one stack."""
    found = {}
    for mode in (Mode.FORWARD, Mode.TRAIN, Mode.PREFILL, Mode.DECODE):
        if isinstance(configs[0], BERTConfig) and mode in (Mode.PREFILL, Mode.DECODE):
            continue
        is_training = mode is Mode.TRAIN
        used = training_dtype if is_training else dtype
        models = [random_model(config, watch.device, used) for config in configs]
        work = Workload(batch=1, length=2, mode=mode, dtype=used)
        name = launch_name(configs[0])
        whole = [watch.whole(step_of(model, work), spend=8 * watch.spend) for model in models]
        found[f"{name}.{mode.value}"] = _overhead(whole)
        if is_training:
            forward = [watch.whole(loss_of(model, work), spend=5 * watch.spend) for model in models]
            found[f"{name}.train_forward"] = _overhead(forward)
    return found


def _overhead(seconds: list[float]) -> Overhead:
    layers = [max(0.0, (other - seconds[0]) / (MANY - FEW)) for other in seconds[1:]]
    return Overhead(
        once=max(0.0, seconds[0] - FEW * sum(layers)),
        layer=layers[0],
        second_layer=layers[1] if len(layers) > 1 else 0.0,
    )
