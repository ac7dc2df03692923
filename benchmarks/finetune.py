"""`python -m benchmarks.finetune`: a pre-trained BERT on tasks, beside random weights, a bag of words and MiniLM.

SST-2 with 100, 1,000 and all labels, three seeds each; SICK's classes and scores; TREC; Banking77. A table on standard
output; finetune.json and finetune.png in the folder given.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import qkv
from benchmarks import machine
from benchmarks.bag_of_words import BagOfWords
from benchmarks.results import Report
from qkv.choices import ProblemKind
from qkv.config import FinetuningConfig
from qkv.inspection.figures import new_figure
from qkv.tasks import TextEncoder
from qkv.training.finetune_data import draw, read_task

SIZES = (100, 1_000, None)
"""Labels of SST-2 to learn from; None: all."""
SEEDS = 3
ONE_SEED = ("sick", "sick score", "trec", "banking77")
"""Tasks that are run with one seed: what differs there is the task, and the time is needed elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    task: str
    engine: str
    labels: int
    measure: str
    mean: float
    spread: float
    seeds: int
    parameters: int
    seconds: float
    """A seed, reading and judging included."""


class Bench:
    """Runs, and what they gave so far."""

    def __init__(
        self, model: TextEncoder, data: Path, *, minilm: TextEncoder | None, seeds: int, epochs: int | None
    ) -> None:
        self.model, self.data, self.minilm = model, data, minilm
        self.seeds, self.epochs = seeds, epochs
        self.rows: list[Row] = []

    def sst2(self) -> None:
        for n_labels in SIZES:
            self.bag_of_words("sst2", n_labels)
            self.tune("sst2", "from scratch", self.model, n_labels=n_labels, from_scratch=True)
            self.tune("sst2", "pre-trained", self.model, n_labels=n_labels)
            if self.minilm is not None:
                self.tune("sst2", "MiniLM", self.minilm, n_labels=n_labels, seeds=1 if n_labels is None else None)

    def others(self) -> None:
        for task in ONE_SEED:
            problem = ProblemKind.NUMBER if task == "sick score" else ProblemKind.ONE_CLASS
            if task in ("trec", "banking77"):
                self.bag_of_words(task, None)
            for engine, model in (("pre-trained", self.model), ("MiniLM", self.minilm)):
                if model is not None:
                    self.tune(task, engine, model, problem=problem, seeds=1)

    def tune(self, task: str, engine: str, model: TextEncoder, *, seeds: int | None = None, **settings: Any) -> None:  # noqa: ANN401
        n_seeds = seeds or self.seeds
        started = time.perf_counter()
        found = qkv.finetune(
            model, *self._files(task), seeds=n_seeds, epochs=self.epochs, truncate=True, **settings
        )  # fmt: skip
        seconds = (time.perf_counter() - started) / n_seeds
        measure, first = found.runs.measures[0], found.runs.results[0]
        self._add(
            Row(
                task=task, engine=engine, labels=first.n_train, measure=measure, mean=found.runs.mean(measure),
                spread=found.runs.spread(measure), seeds=n_seeds, parameters=first.n_parameters, seconds=seconds,
            )
        )  # fmt: skip

    def bag_of_words(self, task: str, n_labels: int | None) -> None:
        train, held_out = self._files(task)
        read = read_task(FinetuningConfig(models=("-",), train=str(train), evaluation=str(held_out)))
        texts, targets = [text for (text, *_) in read.train.texts], read.train_targets
        scores, started, n_parameters, n_rows = [], time.perf_counter(), 0, len(texts)
        n_seeds = 1 if n_labels is None else self.seeds
        for seed in range(n_seeds):
            rows = range(len(texts))
            if n_labels is not None:
                rows = draw(ProblemKind.ONE_CLASS, targets, n_labels, seed=seed).tolist()
            n_rows = len(rows)
            bag = BagOfWords([texts[row] for row in rows], targets[list(rows)].tolist(), seed=seed)
            n_parameters = bag.n_parameters
            answers = torch.tensor(bag.answers([text for (text, *_) in read.evaluation.texts]))
            scores.append(float((answers == read.evaluation_targets).float().mean()))
        self._add(
            Row(
                task=task, engine="bag of words", labels=n_rows, measure="accuracy", mean=statistics.fmean(scores),
                spread=statistics.stdev(scores) if n_seeds > 1 else 0.0, seeds=n_seeds, parameters=n_parameters,
                seconds=(time.perf_counter() - started) / n_seeds,
            )
        )  # fmt: skip

    def _files(self, task: str) -> tuple[Path, Path]:
        folder = self.data / task.partition(" ")[0]
        return folder / "train.tsv", folder / "dev.tsv"

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        sys.stderr.write(
            f"{row.task}, {row.labels:,} labels, {row.engine}: {row.mean:.4f}, {row.seconds:.1f} s a seed\n"
        )


def report(rows: list[Row], load: float) -> Report:
    columns = ["task", "labels", "engine", "parameters", "measure", "score", "seeds", "seconds a seed"]
    cells = [
        [
            row.task, f"{row.labels:,}", row.engine, f"{row.parameters:,}", row.measure,
            f"{row.mean:.4f}" + (f" ± {row.spread:.4f}" if row.seeds > 1 else ""), str(row.seeds), f"{row.seconds:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return Report(
        name="finetune",
        what="Fine-tuning on labelled texts, judged on each task's dev rows with the best of ten evaluations on them.",
        columns=columns,
        rows=cells,
        notes=[
            "from scratch: the same shape with random weights, twice the learning rate, the same number of updates.",
            "bag of words: logistic regression on words and word pairs, its strength chosen on a tenth of the labels.",
            "±: standard deviation over seeds; with few labels each seed draws its own rows.",
        ],
        versions={"torch": str(torch.__version__)},
        load=load,
    )


def draw_curves(rows: list[Row], path: Path) -> None:
    """Accuracy on SST-2 against the number of labels."""
    figure = new_figure(width=6.4, height=4.2)
    axis = figure.subplots()
    colours = {"pre-trained": "#08519c", "from scratch": "#d95f02", "bag of words": "#737373", "MiniLM": "#238b45"}
    for engine, colour in colours.items():
        points = [row for row in rows if row.task == "sst2" and row.engine == engine]
        if points:
            labels, means = [row.labels for row in points], [100 * row.mean for row in points]
            spreads = [100 * row.spread for row in points]
            axis.errorbar(labels, means, yerr=spreads, label=engine, color=colour, marker="o", capsize=3)
    axis.axhline(50.9, color="0.6", linestyle=":", linewidth=1)
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    axis.annotate("always positive", (0.99, 50.9), xytext=(0, 3), color="0.4", fontsize="small", **place)
    axis.set_xscale("log")
    sizes = sorted({row.labels for row in rows if row.task == "sst2"})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("labelled sentences (SST-2)")
    axis.set_ylabel("accuracy on dev (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__)
    parser.add_argument("--model", required=True, help="a pre-trained BERT, as every command takes it")
    parser.add_argument("--data", required=True, type=Path, help="the folder of sst2/, sick/, trec/, banking77/")
    parser.add_argument("--out", required=True, type=Path, help="where the figures go")
    parser.add_argument("--minilm", help="a folder with all-MiniLM-L6-v2, to be fine-tuned beside")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, help="for a quick trial; chosen by the rows unless said")
    asked = parser.parse_args()
    load = machine.others_load()
    encoders = [None if name is None else qkv.load(name) for name in (asked.model, asked.minilm)]
    model, minilm = encoders
    if not isinstance(model, TextEncoder) or not isinstance(minilm, TextEncoder | None):
        raise SystemExit("--model and --minilm: a BERT is needed")
    bench = Bench(model, asked.data, minilm=minilm, seeds=asked.seeds, epochs=asked.epochs)
    bench.sst2()
    bench.others()
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "finetune.json").write_text(json.dumps([asdict(row) for row in bench.rows], indent=1) + "\n")
    draw_curves(bench.rows, asked.out / "finetune.png")
    sys.stdout.write(report(bench.rows, load).text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
