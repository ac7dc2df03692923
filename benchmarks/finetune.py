"""`python -m benchmarks.finetune`: a pre-trained BERT on tasks, beside random weights, a bag of words and MiniLM.

SST-2 with 100, 1,000 and all labels in three seeds (with all labels bag of words and MiniLM have one); SICK's classes
and scores; TREC; Banking77. A table on standard output; finetune.json and finetune.png in the folder given.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

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

SIZES = (None, 1_000, 100)
"""Labels of SST-2 to learn from; None: all."""
SEEDS = 3
SEEDS_WITH_ALL_LABELS = ("from scratch", "pre-trained")
"""Engines that are run with all seeds on all labels too; the others with one."""
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every run of the benchmark shares."""

    model: str
    minilm: str | None
    data: Path
    epochs: int | None

    def files(self, task: str) -> tuple[Path, Path]:
        folder = self.data / task.partition(" ")[0]
        return folder / "train.tsv", folder / "dev.tsv"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One seed of one line of the table."""

    task: str
    engine: str
    n_labels: int | None = None
    seed: int = 0


def jobs(asked: Asked, seeds: int) -> list[Job]:
    """The longest first, so that none of them is waited for at the end."""
    engines = ["from scratch", "pre-trained", *(["MiniLM"] if asked.minilm is not None else []), "bag of words"]
    found = [
        Job(task="sst2", engine=engine, n_labels=n_labels, seed=seed)
        for n_labels in SIZES
        for seed in range(seeds)
        for engine in engines
        if n_labels is not None or seed == 0 or engine in SEEDS_WITH_ALL_LABELS
    ]
    for task in ONE_SEED:
        wanted = engines[1:] if task in ("trec", "banking77") else engines[1:-1]
        found += [Job(task=task, engine=engine) for engine in wanted]
    return found


def row_of(job: Job, asked: Asked) -> Row:
    row = bag_of_words(job, asked) if job.engine == "bag of words" else tuned(job, asked)
    sys.stderr.write(
        f"{row.task}, {row.labels:,} labels, {row.engine}, seed {job.seed}: {row.mean:.4f}, {row.seconds:.1f} s\n"
    )
    return row


def joined(rows: list[Row]) -> list[Row]:
    """One line for all seeds of a task, an engine and a number of labels."""
    alike: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.task, row.labels, row.engine), []).append(row)
    return [
        replace(
            some[0], seeds=len(some), mean=statistics.fmean(row.mean for row in some),
            spread=statistics.stdev(row.mean for row in some) if len(some) > 1 else 0.0,
            seconds=statistics.fmean(row.seconds for row in some),
        )
        for some in alike.values()
    ]  # fmt: skip


def tuned(job: Job, asked: Asked) -> Row:
    name = asked.minilm if job.engine == "MiniLM" else asked.model
    model = qkv.load(str(name))
    if not isinstance(model, TextEncoder):
        raise SystemExit(f"{name}: a BERT is needed")
    problem = ProblemKind.NUMBER if job.task == "sick score" else ProblemKind.ONE_CLASS
    started = time.perf_counter()
    found = qkv.finetune(
        model,
        *asked.files(job.task),
        settings=qkv.FinetuningSettings(
            seed=job.seed, epochs=asked.epochs, truncate=True, n_labels=job.n_labels,
            from_scratch=job.engine == "from scratch", problem=problem,
        ),
    )  # fmt: skip
    measure, first = found.runs.measures[0], found.runs.results[0]
    return Row(
        task=job.task, engine=job.engine, labels=first.n_train, measure=measure, mean=found.runs.mean(measure),
        spread=0.0, seeds=1, parameters=first.n_parameters, seconds=time.perf_counter() - started,
    )  # fmt: skip


def bag_of_words(job: Job, asked: Asked) -> Row:
    train, held_out = asked.files(job.task)
    read = read_task(FinetuningConfig(models=("-",), train=str(train), evaluation=str(held_out)))
    texts, targets = [text for (text, *_) in read.train.texts], read.train_targets
    started = time.perf_counter()
    rows = range(len(texts))
    if job.n_labels is not None:
        rows = draw(ProblemKind.ONE_CLASS, targets, job.n_labels, seed=job.seed).tolist()
    bag = BagOfWords([texts[row] for row in rows], targets[list(rows)].tolist(), seed=job.seed)
    answers = torch.tensor(bag.answers([text for (text, *_) in read.evaluation.texts]))
    return Row(
        task=job.task, engine=job.engine, labels=len(rows), measure="accuracy",
        mean=float((answers == read.evaluation_targets).float().mean()), spread=0.0, seeds=1,
        parameters=bag.n_parameters, seconds=time.perf_counter() - started,
    )  # fmt: skip


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
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; their seconds then share the machine")
    parser.add_argument(
        "--engines", nargs="+", help="these lines alone: pre-trained, from scratch, bag of words, MiniLM"
    )
    parser.add_argument("--earlier", type=Path, help="a finetune.json whose lines are kept beside the new ones")
    given = parser.parse_args()
    load = machine.others_load()
    asked = Asked(model=given.model, minilm=given.minilm, data=given.data, epochs=given.epochs)
    # New processes, for CUDA does not survive a fork.
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        chosen = [job for job in jobs(asked, given.seeds) if given.engines is None or job.engine in given.engines]
        rows = joined(list(pool.map(partial(row_of, asked=asked), chosen)))
    if given.earlier is not None:
        rows = [*(Row(**row) for row in json.loads(given.earlier.read_text())), *rows]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "finetune.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    draw_curves(rows, given.out / "finetune.png")
    sys.stdout.write(report(rows, load).text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
