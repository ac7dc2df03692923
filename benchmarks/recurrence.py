"""What recurrence costs: time and sequential steps against length, the shipped RNN's shape beside the Transformer's."""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks import machine
from benchmarks.results import Report
from benchmarks.runner import Asked
from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.config.files import load_config
from qkv.cost import Mode, Precision, Workload, compare_layer_costs, count_parameters
from qkv.generation import translate
from qkv.generation.prepacked_weights import prepack_weights
from qkv.inspection.figures import new_figure
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.training.benchmark_steps import Step, build_gradient_step, build_random_model
from qkv.training.timer import Timer, retain_freed_memory
from qkv.zoo import shipped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTHS = (8, 16, 32, 64, 128, 256)
BATCH = {"cpu": 4, "cuda": 64}
"""Rows of a training step and of an encoder's pass; a text is decoded alone, as one waits for it."""
SPEND = 0.3
"""Seconds for each measurement, and three runs at least."""
VOCABULARY = 8000
MODELS = {"RNN": "es-en-rnn", "Transformer": "es-en"}
LAYER = {"RNN": "GRU", "Transformer": "self-attention, with Q K V O"}
"""What a layer is called where `cost` compares them."""
COLOURS = {"RNN": "#D55E00", "Transformer": "#0072B2"}
ONE_THREAD = (
    "One thread does one thing after another anyway: steps that wait do not show, and the model that computes less a "
    "token is faster. Times are the process's own."
)
TRAIN, ENCODE, DECODE = "training step", "encoder", "greedy decoding"
TITLES = {
    TRAIN: "Training: n source, n target tokens, forward and backward",
    ENCODE: "Inference: the encoder reads n tokens",
    DECODE: "Inference: n tokens read, n written, one text",
}
Config = RNNConfig | Seq2SeqConfig


@dataclass(frozen=True, kw_only=True)
class Point:
    """One kind of work at one length, by both models."""

    work: str
    length: int
    seconds: dict[str, float]
    steps: dict[str, int]

    @property
    def cells(self) -> list[str]:
        rnn, transformer = self.seconds.values()
        times = [f"{1000 * one:,.2f}" for one in (rnn, transformer)]
        return [self.work, str(self.length), *times, f"{rnn / transformer:.2f}", *map(str, self.steps.values())]


def configs() -> dict[str, Config]:
    """As shipped, but with as many words as each other: so the output layer is the same work."""
    found: dict[str, Config] = {}
    for name, model in MODELS.items():
        config = load_config(shipped()[model] / "config.json")
        assert isinstance(config, RNNConfig | Seq2SeqConfig)
        found[name] = config.replace(vocab_size=VOCABULARY, source_vocab_size=VOCABULARY)
    return found


def sequential_steps(kind: str, config: Config, work: str, n: int) -> int:
    """Layers' steps that must wait for one another; training: backward waits as often as forward."""
    in_a_pass, in_a_step = (
        next(one.sequential_steps for one in compare_layer_costs(length, config.d_model) if one.name == LAYER[kind])
        for length in (n, 1)
    )
    encoder = config.n_encoder_layers * in_a_pass
    match work:
        case "encoder":
            return encoder
        case "greedy decoding":
            return encoder + n * config.n_decoder_layers * in_a_step
        case _:
            return 2 * (encoder + config.n_decoder_layers * in_a_pass)


def steps_of(config: Config, device: torch.device) -> Callable[[str, int], Step]:
    """What is timed, for a kind of work and a length; one model of random weights does it all."""
    model = build_random_model(config, device, Precision.FLOAT32)
    assert isinstance(model, RNNSeq2Seq | Seq2Seq)
    packing = prepack_weights(model)
    batch = BATCH[device.type]

    def build_step(work: str, n: int) -> Step:
        model.train(work == TRAIN)
        if work == TRAIN:
            return build_gradient_step(model, Workload(batch=batch, seq_len=n, mode=Mode.TRAIN))
        ids = torch.randint(VOCABULARY, (batch if work == ENCODE else 1, n), device=device)
        if work == ENCODE:
            return torch.inference_mode()(lambda: model.encode(ids))
        sources = ids.tolist()
        return lambda: translate(model, sources, start_id=0, max_new=[n], stop_ids=frozenset(), prepacked=packing)

    return build_step


def recurrence(asked: Asked) -> Report:
    """Both models in turn at each point, so that a busy minute hits both."""
    load, device = machine.others_load(), torch.device(asked.device)
    torch.set_num_threads(asked.threads or 1)
    retain_freed_memory()
    shapes, timer = configs(), Timer(device)
    made = {kind: steps_of(config, device) for kind, config in shapes.items()}
    points = []
    for work in TITLES:
        for n in LENGTHS:
            seconds = {kind: timer.measure_latency(step(work, n), seconds=SPEND) for kind, step in made.items()}
            steps = {kind: sequential_steps(kind, config, work, n) for kind, config in shapes.items()}
            points.append(Point(work=work, length=n, seconds=seconds, steps=steps))
            asked.say("  ".join(points[-1].cells))
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{threads} CPU thread{'s' * (threads > 1)}"
    return Report(
        name=f"recurrence, {device.type}",
        what=(
            f"An RNN with attention beside a Transformer, by length, on {where} in float32: the shapes of the shipped "
            f"`es-en-rnn` and `es-en` with {VOCABULARY:,} words each, random weights; a training step (without the "
            f"update) and the encoder's pass on {BATCH[device.type]} rows, decoding on one."
        ),
        columns=["work", "n", "RNN ms", "Transformer ms", "RNN ÷ it", "RNN steps in a row", "Transformer's"],
        rows=[point.cells for point in points],
        notes=[
            _sizes(shapes),
            *_growth(points),
            *([ONE_THREAD] if timer.now is time.process_time else []),
            f"Drawn: `docs/pictures/recurrence-{device.type}.png`.",
        ],
        versions={"torch": torch.__version__},
        load=load,
        pictures={f"recurrence-{device.type}.png": drawn(points, f"RNN with attention against Transformer, {where}")},
    )


def _sizes(shapes: dict[str, Config]) -> str:
    told = [
        f"{kind}: {count_parameters(config).total:,} parameters, {config.n_encoder_layers} + {config.n_decoder_layers} "
        f"layers of width {config.d_model}"
        for kind, config in shapes.items()
    ]
    return "; ".join(told) + "."


def _growth(points: Sequence[Point]) -> list[str]:
    said = []
    for work in TITLES:
        first, *_, last = (point for point in points if point.work == work)
        times = [f"{kind} {last.seconds[kind] / first.seconds[kind]:.0f} times the time" for kind in MODELS]
        said.append(f"{work}, from {first.length} to {last.length} tokens: {', '.join(times)}.")
    return said


def drawn(points: Sequence[Point], title: str) -> bytes:
    """Three kinds of work by time, and all of them by steps."""
    figure = new_figure(width=10.0, height=7.0)
    axes = figure.subplots(2, 2).flatten()
    for axis, work in zip(axes, TITLES, strict=False):
        for kind in MODELS:
            own = [point for point in points if point.work == work]
            times = [1000 * point.seconds[kind] for point in own]
            axis.plot([point.length for point in own], times, color=COLOURS[kind], marker="o", label=kind)
        _finish(axis, TITLES[work], "milliseconds")
    for work, dashes in zip(TITLES, ("-", ":", "--"), strict=True):
        for kind in MODELS:
            own = [point for point in points if point.work == work]
            steps = [point.steps[kind] for point in own]
            label = f"{kind}, {work}"
            axes[3].plot([p.length for p in own], steps, dashes, color=COLOURS[kind], marker=".", label=label)
    _finish(axes[3], "Layers' steps that wait for one another", "steps")
    figure.suptitle(title)
    axes[3].set_ylim(top=20 * axes[3].get_ylim()[1])  # room for its legend
    return png(figure)


def png(figure: "Figure") -> bytes:
    """With a palette: a third of the bytes."""
    from PIL import Image

    whole, small = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, format="png")
    Image.open(whole).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


def _finish(axis: "Axes", title: str, y: str) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set(xscale="log", yscale="log", xlabel="n, tokens", ylabel=y)
    axis.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if y == "milliseconds" else (1,)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.minorticks_off()
    axis.set_title(title, fontsize="medium")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
