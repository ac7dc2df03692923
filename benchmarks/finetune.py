"""`python -m benchmarks.finetune`: compare a pre-trained BERT with a BERT trained from scratch, a bag of words
and MiniLM.

The tasks are SST-2 with 100, 1,000 and all labels, the classes and the scores of SICK, TREC, and Banking77. SST-2 runs
with three seeds, except that bag of words and MiniLM use one seed with all labels. The other tasks run with one seed.
The command prints a table and writes finetune.json and finetune.png to the output folder.
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
from qkv.choices import ProblemType
from qkv.config import FinetuningConfig
from qkv.inspection.figures import new_figure
from qkv.tasks import TextEncoder
from qkv.training.finetune_data import load_task_with_evaluation_split, sample_rows

SIZES = (None, 1_000, 100)
"""Numbers of SST-2 labels used for training. None means all labels."""
SEEDS = 3
SEEDS_WITH_ALL_LABELS = ("from scratch", "pre-trained")
"""Engines that train on all labels with every seed. The other engines use only one seed."""
ONE_SEED = ("sick", "sick score", "trec", "banking77")
"""Tasks that run with only one seed to save time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the results table."""

    task: str
    engine: str
    labels: int
    measure: str
    mean: float
    spread: float
    seeds: int
    parameters: int
    seconds: float
    """Time per seed in seconds, including loading and evaluation."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """The settings that all jobs share."""

    model: str
    minilm: str | None
    data: Path
    epochs: int | None

    def files(self, task: str) -> tuple[Path, Path]:
        folder = self.data / task.partition(" ")[0]
        return folder / "train.tsv", folder / "dev.tsv"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, which runs one seed for one row of the table."""

    task: str
    engine: str
    n_train_rows: int | None = None
    seed: int = 0


def list_jobs(benchmark: FinetuneSettings, seeds: int) -> list[Job]:
    """List the jobs from longest to shortest so that no long job runs on its own at the end."""
    engines = ["from scratch", "pre-trained", *(["MiniLM"] if benchmark.minilm is not None else []), "bag of words"]
    result = [
        Job(task="sst2", engine=engine, n_train_rows=n_train_rows, seed=seed)
        for n_train_rows in SIZES
        for seed in range(seeds)
        for engine in engines
        if n_train_rows is not None or seed == 0 or engine in SEEDS_WITH_ALL_LABELS
    ]
    for task in ONE_SEED:
        wanted = engines[1:] if task in ("trec", "banking77") else engines[1:-1]
        result += [Job(task=task, engine=engine) for engine in wanted]
    return result


def run_job(job: Job, benchmark: FinetuneSettings) -> Row:
    row = train_bag_of_words(job, benchmark) if job.engine == "bag of words" else finetune_encoder(job, benchmark)
    sys.stderr.write(
        f"{row.task}, {row.labels:,} labels, {row.engine}, seed {job.seed}: {row.mean:.4f}, {row.seconds:.1f} s\n"
    )
    return row


def average_seeds(rows: list[Row]) -> list[Row]:
    """Average over seeds and return one row for each task, engine and number of labels."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.labels, row.engine), []).append(row)
    return [
        replace(
            group[0],
            seeds=len(group),
            mean=statistics.fmean(row.mean for row in group),
            spread=statistics.stdev(row.mean for row in group) if len(group) > 1 else 0.0,
            seconds=statistics.fmean(row.seconds for row in group),
        )
        for group in groups.values()
    ]


def finetune_encoder(job: Job, benchmark: FinetuneSettings) -> Row:
    name = benchmark.minilm if job.engine == "MiniLM" else benchmark.model
    model = qkv.load(str(name))
    if not isinstance(model, TextEncoder):
        raise SystemExit(f"--model {name}: expected a BERT model, got {type(model).__name__}")
    problem = ProblemType.REGRESSION if job.task == "sick score" else ProblemType.SINGLE_LABEL
    started = time.perf_counter()
    result = qkv.finetune(
        model,
        *benchmark.files(job.task),
        settings=qkv.FinetuningSettings(
            seed=job.seed,
            epochs=benchmark.epochs,
            truncate=True,
            n_train_rows=job.n_train_rows,
            from_scratch=job.engine == "from scratch",
            problem_type=problem,
        ),
    )
    measure, first = result.runs.metrics[0], result.runs.results[0]
    return Row(
        task=job.task,
        engine=job.engine,
        labels=first.n_train,
        measure=measure,
        mean=result.runs.mean(measure),
        spread=0.0,
        seeds=1,
        parameters=first.n_parameters,
        seconds=time.perf_counter() - started,
    )


def train_bag_of_words(job: Job, benchmark: FinetuneSettings) -> Row:
    train, dev = benchmark.files(job.task)
    task = load_task_with_evaluation_split(FinetuningConfig(models=("-",), train=str(train), evaluation=str(dev)))
    texts, targets = [text for (text, *_) in task.train.texts], task.train_targets
    started = time.perf_counter()
    rows = range(len(texts))
    if job.n_train_rows is not None:
        rows = sample_rows(ProblemType.SINGLE_LABEL, targets, job.n_train_rows, seed=job.seed).tolist()
    bag = BagOfWords([texts[row] for row in rows], targets[list(rows)].tolist(), seed=job.seed)
    answers = torch.tensor(bag.predict([text for (text, *_) in task.evaluation.texts]))
    return Row(
        task=job.task,
        engine=job.engine,
        labels=len(rows),
        measure="accuracy",
        mean=float((answers == task.evaluation_targets).float().mean()),
        spread=0.0,
        seeds=1,
        parameters=bag.n_parameters,
        seconds=time.perf_counter() - started,
    )


def report(rows: list[Row], load: float) -> Report:
    columns = ["task", "labels", "engine", "parameters", "metric", "score", "seeds", "seconds per seed"]
    cells = [
        [
            row.task,
            f"{row.labels:,}",
            row.engine,
            f"{row.parameters:,}",
            row.measure,
            f"{row.mean:.4f}" + (f" ± {row.spread:.4f}" if row.seeds > 1 else ""),
            str(row.seeds),
            f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    return Report(
        name="finetune",
        description=(
            "Models trained on labeled texts and evaluated on the dev set of each task (best of ten evaluations)."
        ),
        columns=columns,
        rows=cells,
        notes=[
            (
                '"from scratch": the same architecture with random initial weights, trained with twice the learning '
                "rate and the same number of updates."
            ),
            (
                '"bag of words": logistic regression on words and word pairs. The penalty is chosen on a held-out '
                "tenth of the labels."
            ),
            "±: standard deviation over seeds. If only some of the labels are used, each seed samples different rows.",
        ],
        versions={"torch": str(torch.__version__)},
        load=load,
    )


def draw_curves(rows: list[Row], path: Path) -> None:
    """Plot the accuracy on SST-2 against the number of labels."""
    figure = new_figure(width=6.4, height=4.2)
    axis = figure.subplots()
    colors = {"pre-trained": "#08519c", "from scratch": "#d95f02", "bag of words": "#737373", "MiniLM": "#238b45"}
    for engine, colour in colors.items():
        points = [row for row in rows if row.task == "sst2" and row.engine == engine]
        if points:
            labels, means = [row.labels for row in points], [100 * row.mean for row in points]
            spreads = [100 * row.spread for row in points]
            axis.errorbar(labels, means, yerr=spreads, label=engine, color=colour, marker="o", capsize=3)
    axis.axhline(50.9, color="0.6", linestyle=":", linewidth=1)
    annotation_style = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    axis.annotate("always positive", (0.99, 50.9), xytext=(0, 3), color="0.4", fontsize="small", **annotation_style)
    axis.set_xscale("log")
    sizes = sorted({row.labels for row in rows if row.task == "sst2"})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("labeled sentences (SST-2)")
    axis.set_ylabel("accuracy on dev (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__)
    parser.add_argument("--model", required=True, help="pre-trained BERT: name of a shipped model, or path")
    parser.add_argument(
        "--data", required=True, type=Path, help="folder that contains sst2/, sick/, trec/ and banking77/"
    )
    parser.add_argument("--out", required=True, type=Path, help="output folder for the table and the plot")
    parser.add_argument("--minilm", help="folder with all-MiniLM-L6-v2, to fine-tune it as well")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, help="number of epochs (default: depends on the number of rows)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs in parallel, which share the machine")
    parser.add_argument(
        "--engines", nargs="+", help="run only these engines: pre-trained, from scratch, bag of words, MiniLM"
    )
    parser.add_argument("--earlier", type=Path, help="finetune.json whose rows are added before the new ones")
    arguments = parser.parse_args()
    load = machine.load_average()
    benchmark = FinetuneSettings(
        model=arguments.model, minilm=arguments.minilm, data=arguments.data, epochs=arguments.epochs
    )
    # The processes are spawned because CUDA does not support forking.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        chosen = [
            job
            for job in list_jobs(benchmark, arguments.seeds)
            if arguments.engines is None or job.engine in arguments.engines
        ]
        rows = average_seeds(list(pool.map(partial(run_job, benchmark=benchmark), chosen)))
    if arguments.earlier is not None:
        rows = [*(Row(**row) for row in json.loads(arguments.earlier.read_text())), *rows]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "finetune.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    draw_curves(rows, arguments.out / "finetune.png")
    sys.stdout.write(report(rows, load).text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
