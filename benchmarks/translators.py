r"""`python -m benchmarks.translators`: compare translation systems by BLEU and chrF.

Each system is specified as NAME=PATH. If PATH is a run folder, its model translates the sentences, and the translations
are saved in the output folder. Otherwise, PATH must be a file S.json with the training statistics `parameters`,
`seconds` and `tokens_per_second`, next to the files S.greedy.txt and S.beam5.txt with one translation per line. The
command prints a table and writes translators.json and translators.png to the output folder.

The four systems of qkv are trained for the same time. Each epoch uses train.tsv three times and europarl.tsv once
(`--data` is the folder that contains es-en/). All systems have a BPE vocabulary of 8,000 and about 12 million
parameters, so differences between them cannot be explained by size. The values of pooled heads have the full width. To
compensate, the model with pooled heads has half as many heads, a narrower feed-forward and no output projection:

    qkv train recipes/es-en-rnn.toml tokenizer.vocab_size=8000 model.d_model=496 model.attention=none \
        'pairs.repeat={"es-en/train.tsv.xz"=3}' --minutes 4 --data data --out rnn-without
    qkv train recipes/es-en-rnn.toml tokenizer.vocab_size=8000 model.d_model=480 \
        'pairs.repeat={"es-en/train.tsv.xz"=3}' --minutes 4 --data data --out rnn-with
    qkv train recipes/es-en.toml 'data.train=["es-en/train.tsv.xz","es-en/europarl.tsv.xz"]' \
        --minutes 4 --data data --out split
    qkv train recipes/es-en.toml 'data.train=["es-en/train.tsv.xz","es-en/europarl.tsv.xz"]' \
        model.head_combination=pooled model.n_heads=4 model.output_projection=false model.d_ff=608 \
        --minutes 4 --data data --out pooled
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.results import Report, write_files
from qkv.data.pair_files import Pair, PairFile
from qkv.errors import InputError
from qkv.inspection.figures import new_figure
from qkv.tasks import Translator, load_as, translator
from qkv.text.translation_metrics import (
    N_BOOTSTRAP_SAMPLES,
    MetricScore,
    bleu_by_source_length,
    compare_with_first_system,
    score_translations,
)

SEARCHES = {"greedy": 1, "beam5": 5}
"""Number of beams for each search method. Translation files are named after the search method."""
GPU_SOURCE_TOKENS = 16_384
"""Number of source tokens per batch on a GPU, which would be underused with batches as small as on a CPU."""
COLORS = ("#737373", "#d95f02", "#08519c", "#6baed6", "#238b45", "#762a83")


@dataclass(frozen=True, kw_only=True)
class TrainingStats:
    """The training statistics of a system, where None means unknown."""

    parameters: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    """Number of source and target tokens processed per second, without padding."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The translations of a system, keyed by search method, and its training statistics."""

    name: str
    translations: Mapping[str, Sequence[str]]
    stats: TrainingStats


@dataclass(frozen=True, kw_only=True)
class SystemScore:
    """The scores of a translation system."""

    system: System
    scores: Mapping[str, Mapping[str, MetricScore]]
    """Scores, keyed by search method and metric."""
    bleu_by_source_length: Sequence[Mapping[str, Any]]
    """BLEU with beam 5, keyed by source length."""


def read_training_stats(folder: Path) -> dict[str, float]:
    """Read the training time and tokens per second from the metrics of a run folder.

    Other folders have no statistics.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in entries if "tokens" in entry]
    if not steps:
        raise InputError(f"{path}: found no training steps")
    last = steps[-1]
    return {"seconds": last["seconds"], "tokens_per_second": last["tokens"] / last["seconds"]}


def translate(name: str, folder: Path, sources: list[str], device: torch.device) -> System:
    task = load_as(Translator, folder)
    task.model.to(device)
    parameters = sum(weights.numel() for weights in task.model.parameters())
    translations = {}
    for search, beam in SEARCHES.items():
        sys.stderr.write(f"{name}: {search} …\n")
        translations[search] = task.translate(sources, beam=beam, split=True)
    return System(
        name=name, translations=translations, stats=TrainingStats(parameters=parameters, **read_training_stats(folder))
    )


def save_system(system: System, folder: Path) -> None:
    """Save a translation system in the format that `load_system` reads."""
    stem = re.sub(r"\W+", "-", system.name)
    (folder / f"{stem}.json").write_text(json.dumps(asdict(system.stats), indent=1) + "\n", encoding="utf-8")
    for search, lines in system.translations.items():
        (folder / f"{stem}.{search}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def load_system(name: str, path: Path) -> System:
    """Load a translation system from its S.json file and its translation files."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "parameters" not in data:
        raise InputError(f"{path}: `parameters` is missing")
    stats = TrainingStats(**{name: data.get(name) for name in TrainingStats.__dataclass_fields__})
    translations = {
        search: path.with_suffix(f".{search}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for search in SEARCHES
    }
    return System(name=name, translations=translations, stats=stats)


def score_systems(
    systems: Sequence[System], pairs: Sequence[Pair], *, peer: str | None, n_bootstrap_samples: int
) -> list[SystemScore]:
    """Score the systems in order.

    If a peer is given, all other systems are compared with it by paired bootstrap.
    """
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    for system in systems:
        for search, lines in system.translations.items():
            if len(lines) != len(pairs):
                raise InputError(f"{system.name}, {search}: {len(lines)} translations, expected {len(pairs)}")
    result = {
        search: _score_search(systems, search, references, peer=peer, n_bootstrap_samples=n_bootstrap_samples)
        for search in SEARCHES
    }
    return [
        SystemScore(
            system=system,
            scores={search: result[search][system.name] for search in SEARCHES},
            bleu_by_source_length=bleu_by_source_length(sources, system.translations["beam5"], references),
        )
        for system in systems
    ]


def _score_search(
    systems: Sequence[System], search: str, references: Sequence[str], *, peer: str | None, n_bootstrap_samples: int
) -> dict[str, dict[str, MetricScore]]:
    translations = {system.name: system.translations[search] for system in systems}
    if peer is None or len(translations) == 1:
        return {
            name: score_translations(lines, references, n_bootstrap_samples=n_bootstrap_samples)
            for name, lines in translations.items()
        }
    # The reference system must be the first in the list.
    return compare_with_first_system(
        {peer: translations.pop(peer), **translations}, references, n_bootstrap_samples=n_bootstrap_samples
    )


def report(result: Sequence[SystemScore], *, peer: str | None, device: str, load: float) -> Report:
    buckets = [f"{row['words']} words ({row['sentences']:,})" for row in result[0].bleu_by_source_length]
    columns = ["system", "parameters", "training s", "tokens/s", "BLEU greedy", "chrF greedy", "BLEU beam 5"]
    signatures = {name: metric.signature for name, metric in result[0].scores["beam5"].items()}
    comparison_note = (
        []
        if peer is None
        else [f"p: p-value of the difference in BLEU (beam 5) between the system and {peer}, by paired bootstrap."]
    )
    return Report(
        name="translators",
        description=(
            "Translation from Spanish to English. The scores compare the translations with human translations. None of "
            "the test sentences was used for training."
        ),
        columns=[*columns, "chrF beam 5", "p", *buckets],
        rows=[_format_cells(score) for score in result],
        notes=[
            f"Device for translation: {device}.",
            (
                "tokens/s: source and target tokens per second of training, without padding. Brackets: 95 % bootstrap "
                "confidence intervals."
            ),
            ("Word-count columns: BLEU with beam 5 for sources of this length (number of sentences in parentheses)."),
            *comparison_note,
            *(f"{name}: {signature}." for name, signature in signatures.items()),
        ],
        versions={"torch": str(torch.__version__)},
        load=load,
        files={"translators.json": [_score_to_dict(score) for score in result]},
    )


def _format_cells(score: SystemScore) -> list[str]:
    stats = score.system.stats
    p_value = score.scores["beam5"]["BLEU"].p_value
    return [
        score.system.name,
        f"{stats.parameters:,}",
        "–" if stats.seconds is None else f"{stats.seconds:.0f}",
        "–" if stats.tokens_per_second is None else f"{stats.tokens_per_second:,.0f}",
        *(_with_interval(score.scores[search][metric]) for search in SEARCHES for metric in ("BLEU", "chrF")),
        "–" if p_value is None else f"{p_value:.4f}",
        *(f"{row['bleu']:.1f}" for row in score.bleu_by_source_length),
    ]


def _with_interval(metric: MetricScore) -> str:
    return f"{metric.score:.2f}" + (
        "" if metric.low is None or metric.high is None else f" [{metric.low:.1f}, {metric.high:.1f}]"
    )


def _score_to_dict(score: SystemScore) -> dict[str, Any]:
    scores = {
        search: {name: asdict(metric) for name, metric in metrics.items()} for search, metrics in score.scores.items()
    }
    return {
        "name": score.system.name,
        **asdict(score.system.stats),
        **scores,
        "by_length": list(score.bleu_by_source_length),
    }


def plot_scores(result: Sequence[SystemScore], path: Path) -> None:
    """Plot the BLEU score of each system, in total and by source length."""
    figure = new_figure(width=10.5, height=4.2)
    totals, lengths = figure.subplots(1, 2, width_ratios=(1, 1.1))
    for position, score in enumerate(result):
        color = COLORS[position % len(COLORS)]
        beam, greedy = (score.scores[search]["BLEU"] for search in ("beam5", "greedy"))
        totals.barh(position, beam.score, color=color, height=0.6)
        if beam.low is not None and beam.high is not None:
            totals.plot([beam.low, beam.high], [position, position], color="black", linewidth=1.2)
        totals.plot(greedy.score, position, marker="D", color="white", markeredgecolor="black", markersize=5)
        right = max(beam.score, greedy.score, beam.high or 0.0)
        totals.annotate(f"{beam.score:.1f}", (right, position), xytext=(4, 0), textcoords="offset points", va="center")
        bleu = [row["bleu"] for row in score.bleu_by_source_length]
        lengths.plot(range(len(bleu)), bleu, color=color, marker="o", markersize=4, label=score.system.name)
    totals.set_yticks(range(len(result)), [score.system.name for score in result])
    totals.invert_yaxis()
    totals.margins(x=0.12)
    totals.set_xlim(left=0)
    totals.set_xlabel("BLEU: bar beam 5 with 95 % interval, diamond greedy")
    lengths.set_xticks(
        range(len(result[0].bleu_by_source_length)),
        [f"{row['words']}\n({row['sentences']:,})" for row in result[0].bleu_by_source_length],
    )
    lengths.set_xlabel("source words (sentences)")
    lengths.set_ylabel("BLEU, beam 5")
    lengths.set_ylim(bottom=0)
    lengths.legend(frameon=False, fontsize="small")
    for axis in (totals, lengths):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path)


def collect_systems(named: Sequence[str], sources: list[str], out: Path, device: torch.device) -> list[System]:
    systems: list[System] = []
    for argument in named:
        name, separator, path = argument.partition("=")
        if not separator or not name or not Path(path).exists():
            raise InputError(f"{argument}: expected NAME=PATH, where PATH is an existing run folder or .json file")
        if Path(path).is_file():
            systems.append(load_system(name, Path(path)))
        else:
            systems.append(translate(name, Path(path), sources, device))
            save_system(systems[-1], out)
    return systems


def run(arguments: argparse.Namespace) -> Report:
    load, device = machine.load_average(), torch.device(arguments.device)
    names = [argument.partition("=")[0] for argument in arguments.systems]
    if len(set(names)) < len(names):
        raise InputError(f"system names are not unique: expected {len(names)} different names, got {len(set(names))}")
    if arguments.peer is not None and arguments.peer not in names:
        raise InputError(f"--peer {arguments.peer}: must be one of the systems ({', '.join(names)})")
    if device.type == "cuda":
        translator.SOURCE_TOKENS_PER_BATCH = GPU_SOURCE_TOKENS
    arguments.out.mkdir(parents=True, exist_ok=True)
    pairs = list(PairFile(source=arguments.pairs).read())
    systems = collect_systems(arguments.systems, [source for source, _ in pairs], arguments.out, device)
    result = score_systems(systems, pairs, peer=arguments.peer, n_bootstrap_samples=arguments.draws)
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine.processor()
    results = report(result, peer=arguments.peer, device=name, load=load)
    write_files(results, arguments.out)
    plot_scores(result, arguments.out / "translators.png")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translators", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("systems", nargs="+", metavar="NAME=PATH")
    parser.add_argument(
        "--pairs", required=True, type=Path, help="file with source⇥target per line, such as es-en/test.tsv"
    )
    parser.add_argument("--out", required=True, type=Path, help="output folder for the translations, scores and plot")
    parser.add_argument("--peer", help="NAME of the system with which all others are compared")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=N_BOOTSTRAP_SAMPLES, help="number of bootstrap samples")
    arguments = parser.parse_args(argv)
    try:
        sys.stdout.write(run(arguments).text())
    except InputError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
