"""Predicted and measured time of models and sizes that the calibration did not see, and of long contexts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.results import Report
from benchmarks.runner import Asked, Say
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload, operations
from qkv.cost.calibration import Calibration
from qkv.cost.prediction import predict
from qkv.training.calibrating import calibrate
from qkv.training.measuring import random_model, step_of
from qkv.training.stopwatch import Stopwatch

CONTEXTS = (1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model at one size, and what came of it."""

    model: str
    work: Workload
    predicted: float
    measured: float
    bound_by: str
    square: tuple[int, int] | None = None
    """Of a long context: bytes of the largest tensor, predicted and seen."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> list[str]:
        work = self.work
        source = "" if work.source_length is None else f" from {work.source_length}"
        times = [f"{1000 * seconds:.3f}" for seconds in (self.predicted, self.measured)]
        name = self.model if work.kernel.value == "fused" else f"{self.model}, plain"
        return [
            name,
            work.mode.value,
            f"{work.batch}×{work.length}{source}",
            *times,
            f"{self.error:+.0%}",
            self.bound_by,
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model, "work": self.work.model_dump(mode="json", exclude_defaults=True),
            "predicted": self.predicted, "measured": self.measured, "error": self.error, "bound_by": self.bound_by,
            "square": self.square,
        }  # fmt: skip


def models(kind: str) -> dict[str, ModelConfig]:
    """By name; sizes stand between those of the calibration's grid."""
    if kind == "cpu":
        llama: dict[str, Any] = {"d_model": 320, "n_heads": 5, "n_layers": 6, "d_ff": 864, "vocabulary_size": 4096}
        return {
            "gpt-nano": preset("gpt-nano"),
            "gpt 192×4": GPTConfig(vocabulary_size=2003, context_length=4096, d_model=192, n_heads=3, n_layers=4),
            "gpt2": preset("gpt2"),
            "llama 320×6": _llama(llama),
            "bert 384×3": BERTConfig(
                vocabulary_size=8000, context_length=512, d_model=384, n_heads=6, n_layers=3, masked_word_head=True
            ),
            "seq2seq 256×3+2": Seq2SeqConfig(
                vocabulary_size=6000, context_length=512, d_model=256, n_heads=4, n_encoder_layers=3, n_decoder_layers=2
            ),
            "rnn 192": RNNConfig(vocabulary_size=5000, d_model=192),
        }
    llama = {"d_model": 2048, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8, "d_ff": 5632, "vocabulary_size": 32000}
    return {
        "gpt-nano": preset("gpt-nano"),
        "gpt2": preset("gpt2", context_length=4096),
        "gpt 384×6": GPTConfig(vocabulary_size=4096, context_length=8192, d_model=384, n_heads=6, n_layers=6),
        "gpt2-large": preset("gpt2-large"),
        "llama 2048×8": _llama(llama),
        "bert-base": preset("bert-base", masked_word_head=True),
        "transformer-base": preset("transformer-base", dropout=0.0),
        "rnn 512": RNNConfig(vocabulary_size=16000, d_model=512),
    }


def _llama(shape: dict[str, Any]) -> GPTConfig:
    return GPTConfig(
        context_length=8192, positions="rotary", norm="rms", activation="silu", gated=True, attention_bias=False,
        feedforward_bias=False, tie_embeddings=False, **shape,
    )  # type: ignore[arg-type]  # fmt: skip


def sizes(kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(model, mode, batch and lengths)."""
    if kind == "cpu":
        return [
            ("gpt-nano", "decode", {"batch": 1, "length": 40}),
            ("gpt-nano", "forward", {"batch": 1, "length": 12}),
            ("gpt-nano", "train", {"batch": 2, "length": 24}),
            ("gpt 192×4", "forward", {"batch": 4, "length": 130}),
            ("gpt 192×4", "train", {"batch": 4, "length": 130}),
            ("gpt 192×4", "prefill", {"batch": 1, "length": 300}),
            ("gpt 192×4", "decode", {"batch": 1, "length": 300}),
            ("gpt 192×4", "decode", {"batch": 8, "length": 700}),
            ("gpt 192×4", "forward", {"batch": 1, "length": 1500}),
            ("gpt 192×4", "forward", {"batch": 1, "length": 700, "kernel": "plain"}),
            ("gpt 192×4", "train", {"batch": 1, "length": 900}),
            ("gpt2", "forward", {"batch": 1, "length": 100}),
            ("gpt2", "decode", {"batch": 1, "length": 200}),
            ("gpt2", "train", {"batch": 1, "length": 100}),
            ("llama 320×6", "forward", {"batch": 2, "length": 200}),
            ("llama 320×6", "train", {"batch": 2, "length": 90}),
            ("llama 320×6", "prefill", {"batch": 1, "length": 400}),
            ("llama 320×6", "decode", {"batch": 1, "length": 400}),
            ("llama 320×6", "decode", {"batch": 6, "length": 150}),
            ("bert 384×3", "forward", {"batch": 8, "length": 60}),
            ("bert 384×3", "train", {"batch": 4, "length": 90}),
            ("seq2seq 256×3+2", "forward", {"batch": 4, "length": 40, "source_length": 50}),
            ("seq2seq 256×3+2", "train", {"batch": 4, "length": 40, "source_length": 50}),
            ("seq2seq 256×3+2", "decode", {"batch": 2, "length": 60, "source_length": 80}),
            ("rnn 192", "forward", {"batch": 12, "length": 25, "source_length": 30}),
            ("rnn 192", "train", {"batch": 12, "length": 25, "source_length": 30}),
            ("rnn 192", "decode", {"batch": 5, "length": 25, "source_length": 30}),
        ]
    return [
        ("gpt-nano", "forward", {"batch": 1, "length": 12}),
        ("gpt-nano", "train", {"batch": 4, "length": 100}),
        ("gpt-nano", "decode", {"batch": 1, "length": 40}),
        ("gpt 384×6", "forward", {"batch": 3, "length": 200}),
        ("gpt 384×6", "train", {"batch": 64, "length": 256}),
        ("gpt 384×6", "decode", {"batch": 48, "length": 3000}),
        ("gpt 384×6", "forward", {"batch": 1, "length": 7000}),
        ("gpt2", "forward", {"batch": 1, "length": 700}),
        ("gpt2", "forward", {"batch": 24, "length": 1000}),
        ("gpt2", "train", {"batch": 12, "length": 1024}),
        ("gpt2", "train", {"batch": 1, "length": 300}),
        ("gpt2", "prefill", {"batch": 6, "length": 1500}),
        ("gpt2", "decode", {"batch": 1, "length": 500}),
        ("gpt2", "decode", {"batch": 90, "length": 1500}),
        ("gpt2", "forward", {"batch": 2, "length": 1500, "kernel": "plain"}),
        ("gpt2-large", "forward", {"batch": 4, "length": 900}),
        ("gpt2-large", "decode", {"batch": 1, "length": 900}),
        ("llama 2048×8", "prefill", {"batch": 1, "length": 6000}),
        ("llama 2048×8", "train", {"batch": 3, "length": 1500}),
        ("llama 2048×8", "decode", {"batch": 1, "length": 5000}),
        ("bert-base", "forward", {"batch": 40, "length": 200}),
        ("bert-base", "train", {"batch": 24, "length": 400}),
        ("transformer-base", "forward", {"batch": 50, "length": 60, "source_length": 70}),
        ("transformer-base", "train", {"batch": 50, "length": 60, "source_length": 70}),
        ("transformer-base", "decode", {"batch": 3, "length": 60, "source_length": 70}),
        ("rnn 512", "forward", {"batch": 50, "length": 60, "source_length": 70}),
        ("rnn 512", "train", {"batch": 50, "length": 60, "source_length": 70}),
        ("rnn 512", "decode", {"batch": 3, "length": 60, "source_length": 70}),
    ]


def cost(asked: Asked) -> Report:
    """Calibrate, then predict and measure; nothing is fitted to these points."""
    load = machine.others_load()
    device = torch.device(asked.device)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    dtype = Precision.BFLOAT16 if device.type == "cuda" else Precision.FLOAT32
    calibration = calibrate(device, dtype, asked.say)
    asked.say(f"calibrated {calibration.device} in {calibration.took:.0f} s")
    # The long ones first: a CPU's large tensors come from fresh pages until an allocator has learnt to keep them.
    long = list(_long_contexts(calibration, device, asked.say))
    found = list(_points(calibration, device, asked.say))
    rows = [point.cells for point in [*found, *long]]
    return Report(
        name=f"cost, {device.type}",
        what="Predicted by a calibration of this device that saw none of these models and sizes, and measured.",
        columns=["model", "mode", "batch × length", "predicted ms", "measured ms", "error", "bound by"],
        rows=rows,
        notes=_notes(calibration, found, long),
        versions={"torch": torch.__version__},
        load=load,
        data={
            "calibration": calibration.model_dump(mode="json"), "points": [one.as_dict() for one in found],
            "long_contexts": [one.as_dict() for one in long], "summary": _summary(found),
        },
    )  # fmt: skip


def _summary(points: Sequence[Point]) -> Mapping[str, float]:
    errors = [abs(point.error) for point in points]
    return {"points": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)}


def _notes(calibration: Calibration, found: list[Point], long: list[Point]) -> list[str]:
    worst = max(found, key=lambda point: abs(point.error))
    by_mode = []
    for mode in sorted({point.work.mode for point in found}):
        errors = [abs(point.error) for point in found if point.work.mode is mode]
        by_mode.append(f"{mode.value} {sum(errors) / len(errors):.0%}")
    said = [
        f"Calibration: {calibration.device}, {calibration.dtype.value}, {calibration.took:.0f} s.",
        f"Mean error of {len(found)} points: {_summary(found)['mean_error']:.1%}; worst {worst.error:+.0%}: "
        + " ".join(worst.cells[:3]) + ". By mode: " + ", ".join(by_mode) + ".",
    ]  # fmt: skip
    for point in long:
        assert point.square is not None
        predicted, seen = point.square
        said.append(
            f"Context {point.work.length}, {point.work.kernel.value} attention: largest tensor {seen:,} bytes "
            f"(predicted {predicted:,}), {1000 * point.measured:.1f} ms (predicted {1000 * point.predicted:.1f})."
        )
    return said


def _points(calibration: Calibration, device: torch.device, say: Say) -> Iterator[Point]:
    known = models(device.type)
    for name, mode, size in sizes(device.type):
        dtype = calibration.training_dtype if mode == "train" else calibration.dtype
        work = Workload(**size, mode=Mode(mode), dtype=dtype)
        try:
            point = _measure(name, known[name], work, calibration, device)
        except RuntimeError as error:
            # One model too large for a device must not cost the others their figures.
            say(f"Failed: {name} {mode} {size}: {str(error).splitlines()[0]}")
            continue
        say("  ".join(point.cells))
        yield point


def _measure(name: str, config: ModelConfig, work: Workload, calibration: Calibration, device: torch.device) -> Point:
    prediction = predict(config, work, calibration)
    step = step_of(random_model(config, device, work.dtype), work)
    step()
    measured = Stopwatch(device).whole(step, spend=0.4)
    return Point(
        model=name, work=work, predicted=prediction.seconds, measured=measured, bound_by=prediction.bound_by
    )  # fmt: skip


def _long_contexts(calibration: Calibration, device: torch.device, say: Say) -> Iterator[Point]:
    """A context of 1024, 2048, 4096, plain and fused: time, and the N×N table that only the plain road holds."""
    d_model = 768 if device.type == "cuda" else 128
    config = GPTConfig(vocabulary_size=512, context_length=4096, d_model=d_model, n_heads=d_model // 64, n_layers=2)
    for n in CONTEXTS:
        for kernel in ("plain", "fused"):
            work = Workload(batch=1, length=n, mode=Mode.FORWARD, dtype=calibration.dtype, kernel=kernel)
            point = _measure(f"gpt {d_model}×2", config, work, calibration, device)
            step = step_of(random_model(config, device, work.dtype), work)
            with _Largest() as seen:
                step()
            size = work.dtype.narrow
            is_fused = kernel == "fused"
            held = max(one.writes - (one.inside_writes if is_fused else 0) for one in operations(config, work)) * size
            point = Point(**{**point.__dict__, "square": (held, seen.n_bytes)})
            say("  ".join(point.cells))
            yield point


class _Largest(TorchDispatchMode):
    """Sees every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.n_bytes = max(self.n_bytes, one.nbytes)
        return result
