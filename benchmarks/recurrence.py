"""Benchmark the time and sequential steps of an RNN and a Transformer, shaped like the shipped models, by length."""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks import machine
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions
from qkv.cli.process import retain_freed_memory
from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.config.model import load_config
from qkv.cost import Mode, Precision, Workload, compare_attention_with_rnn_costs, count_parameters
from qkv.engines import decode_engine
from qkv.generation import translate
from qkv.inspection.figures import new_figure
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.training.benchmark_steps import Step, build_loss_and_backward_step, build_random_model
from qkv.training.timer import Timer
from qkv.zoo import shipped_model_folders

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTHS = (8, 16, 32, 64, 128, 256)
BATCH = {"cpu": 4, "cuda": 64}
"""Batch size of a training step and of the encoder. Decoding uses a single sequence."""
SECONDS_PER_MEASUREMENT = 0.3
"""Duration of each measurement in seconds. Each measurement includes at least three runs."""
VOCAB_SIZE = 8000
MODELS = {"RNN": "es-en-rnn", "Transformer": "es-en"}
LAYER = {"RNN": "GRU", "Transformer": "self-attention, with Q K V O"}
"""Name that `compare_attention_with_rnn_costs` uses for each model's layer."""
COLORS = {"RNN": "#D55E00", "Transformer": "#0072B2"}
ONE_THREAD = (
    "With one thread, all operations run sequentially, so the number of sequential steps does not affect the time, and "
    "the model with fewer FLOPs per token is faster. Times are CPU times of the process."
)
TRAIN, ENCODE, DECODE = "training step", "encoder", "greedy decoding"
TITLES = {
    TRAIN: "Training: n source and n target tokens, forward and backward pass",
    ENCODE: "Inference: encoding of n tokens",
    DECODE: "Inference: n source tokens, n generated tokens, one sequence",
}
Config = RNNConfig | Seq2SeqConfig


@dataclass(frozen=True, kw_only=True)
class Point:
    """The times and sequential steps of both models for one task at one length."""

    task: str
    length: int
    seconds: dict[str, float]
    steps: dict[str, int]

    @property
    def cells(self) -> list[str]:
        rnn, transformer = self.seconds.values()
        times = [f"{1000 * cost:,.2f}" for cost in (rnn, transformer)]
        return [self.task, str(self.length), *times, f"{rnn / transformer:.2f}", *map(str, self.steps.values())]


def load_configs() -> dict[str, Config]:
    """Load the configs of the shipped models with the same vocabulary size so that the output layers cost the same."""
    configs_by_kind: dict[str, Config] = {}
    for name, model in MODELS.items():
        config = load_config(shipped_model_folders()[model] / "config.json")
        assert isinstance(config, RNNConfig | Seq2SeqConfig)
        configs_by_kind[name] = config.replace(vocab_size=VOCAB_SIZE, source_vocab_size=VOCAB_SIZE)
    return configs_by_kind


def sequential_steps(kind: str, config: Config, task: str, n: int) -> int:
    """Count the layer steps that must run one after another.

    In training, the backward pass has as many steps as the forward pass.
    """
    steps_per_pass, steps_per_token = (
        next(
            cost.sequential_steps
            for cost in compare_attention_with_rnn_costs(length, config.d_model)
            if cost.name == LAYER[kind]
        )
        for length in (n, 1)
    )
    encoder = config.n_encoder_layers * steps_per_pass
    match task:
        case "encoder":
            return encoder
        case "greedy decoding":
            return encoder + n * config.n_decoder_layers * steps_per_token
        case _:
            return 2 * (encoder + config.n_decoder_layers * steps_per_pass)


def build_timed_steps(config: Config, device: torch.device) -> Callable[[str, int], Step]:
    """Return a function that builds the timed step for a task and a length. All steps use the same random model."""
    model = build_random_model(config, device, Precision.FLOAT32)
    assert isinstance(model, RNNSeq2Seq | Seq2Seq)
    batch = BATCH[device.type]

    def build_step(task: str, n: int) -> Step:
        model.train(task == TRAIN)
        if task == TRAIN:
            return build_loss_and_backward_step(model, Workload(batch_size=batch, seq_len=n, mode=Mode.TRAIN))
        ids = torch.randint(VOCAB_SIZE, (batch if task == ENCODE else 1, n), device=device)
        if task == ENCODE:
            return torch.inference_mode()(lambda: model.encode(ids))
        sources = ids.tolist()
        return lambda: translate(
            model, sources, start_id=0, max_new=[n], stop_ids=frozenset(), create_engine=decode_engine
        )

    return build_step


def recurrence(options: BenchmarkOptions) -> Report:
    """Measure the two models in turn at each point so that a period of high load affects both models."""
    load, device = machine.load_average(), torch.device(options.device)
    torch.set_num_threads(options.threads or 1)
    retain_freed_memory()
    shapes, timer = load_configs(), Timer(device)
    step_builders = {kind: build_timed_steps(config, device) for kind, config in shapes.items()}
    points = []
    for task in TITLES:
        for n in LENGTHS:
            seconds = {
                kind: timer.measure_lower_quartile_latency(step(task, n), seconds=SECONDS_PER_MEASUREMENT)
                for kind, step in step_builders.items()
            }
            steps = {kind: sequential_steps(kind, config, task, n) for kind, config in shapes.items()}
            points.append(Point(task=task, length=n, seconds=seconds, steps=steps))
            options.log("  ".join(points[-1].cells))
    threads = torch.get_num_threads()
    device_title = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{threads} CPU thread{'s' * (threads > 1)}"
    )
    return Report(
        name=f"recurrence, {device.type}",
        description=(
            f"An RNN with attention compared with a Transformer at different lengths, on {device_title} in float32. "
            "The models have the shapes of the shipped `es-en-rnn` and `es-en`, with "
            f"vocab_size={VOCAB_SIZE:,} and random weights. The training step (without the update) and the encoder "
            f"run with batch size {BATCH[device.type]}, and decoding runs with batch size 1."
        ),
        columns=[
            "task",
            "n",
            "RNN ms",
            "Transformer ms",
            "RNN ÷ Transformer",
            "sequential steps RNN",
            "sequential steps Transformer",
        ],
        rows=[point.cells for point in points],
        notes=[
            _describe_sizes(shapes),
            *_describe_growth(points),
            *([ONE_THREAD] if timer.now is time.process_time else []),
            f"Plot: `docs/pictures/recurrence-{device.type}.png`.",
        ],
        versions={"torch": torch.__version__},
        load=load,
        plots={
            f"recurrence-{device.type}.png": plot_points(points, f"RNN with attention vs. Transformer, {device_title}")
        },
    )


def _describe_sizes(shapes: dict[str, Config]) -> str:
    sizes = [
        f"{kind}: {count_parameters(config).total:,} parameters, {config.n_encoder_layers} + {config.n_decoder_layers} "
        f"layers of width {config.d_model}"
        for kind, config in shapes.items()
    ]
    return "; ".join(sizes) + "."


def _describe_growth(points: Sequence[Point]) -> list[str]:
    notes = []
    for task in TITLES:
        first, *_, last = (point for point in points if point.task == task)
        factors = [f"{last.seconds[kind] / first.seconds[kind]:.0f} ({kind})" for kind in MODELS]
        notes.append(
            f"{task.capitalize()}: from {first.length} to {last.length} tokens, the time grows by a factor of "
            f"{' and '.join(factors)}."
        )
    return notes


def plot_points(points: Sequence[Point], title: str) -> bytes:
    """Plot the time of the three tasks and the number of sequential steps, and return a PNG file."""
    figure = new_figure(width=10.0, height=7.0)
    axes = figure.subplots(2, 2).flatten()
    for axis, task in zip(axes, TITLES, strict=False):
        for kind in MODELS:
            task_points = [point for point in points if point.task == task]
            times = [1000 * point.seconds[kind] for point in task_points]
            axis.plot([point.length for point in task_points], times, color=COLORS[kind], marker="o", label=kind)
        _format_axis(axis, TITLES[task], "milliseconds")
    for task, dashes in zip(TITLES, ("-", ":", "--"), strict=True):
        for kind in MODELS:
            task_points = [point for point in points if point.task == task]
            steps = [point.steps[kind] for point in task_points]
            label = f"{kind}, {task}"
            axes[3].plot([p.length for p in task_points], steps, dashes, color=COLORS[kind], marker=".", label=label)
    _format_axis(axes[3], "Sequential layer steps", "steps")
    figure.suptitle(title)
    axes[3].set_ylim(top=20 * axes[3].get_ylim()[1])  # leaves space for the legend
    return encode_png(figure)


def encode_png(figure: "Figure") -> bytes:
    """Encode a figure as PNG with a color palette, which reduces the file size to a third."""
    from PIL import Image

    full, quantized = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png")
    Image.open(full).convert("RGB").quantize(64).save(quantized, format="png", optimize=True)
    return quantized.getvalue()


def _format_axis(axis: "Axes", title: str, y: str) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set(xscale="log", yscale="log", xlabel="n, tokens", ylabel=y)
    axis.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if y == "milliseconds" else (1,)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.minorticks_off()
    axis.set_title(title, fontsize="medium")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
