r"""`python -m benchmarks.translators`: which translator is nearest to what people wrote, and by how much.

A system is NAME=PLACE. PLACE is a run's folder, which is translated with here; or a file S.json with `parameters`,
`seconds` and `tokens_per_second` (of training), beside which S.greedy.txt and S.beam5.txt hold one translation a line.
A system that is translated with is kept in the folder given in that second form too. A table on standard output;
translators.json and translators.png in the folder given.

The four of ours, each on train.tsv three times and europarl.tsv once an epoch, in the same time (`--data` is the folder
of es-en/). All have a BPE of 8,000 and about 12 million parameters, so that size explains no difference; pooled heads
have values of full width, for which they get half as many heads, a narrower feed-forward and no output projection:

    qkv train recipes/es-en-rnn.toml tokenizer.vocab_size=8000 model.d_model=496 model.attention=none \
        'pairs.repeat={"es-en/train.tsv.xz"=3}' --minutes 4 --data data --out rnn-without
    qkv train recipes/es-en-rnn.toml tokenizer.vocab_size=8000 model.d_model=480 \
        'pairs.repeat={"es-en/train.tsv.xz"=3}' --minutes 4 --data data --out rnn-with
    qkv train recipes/es-en.toml 'data.train=["es-en/train.tsv.xz","es-en/europarl.tsv.xz"]' \
        --minutes 4 --data data --out split
    qkv train recipes/es-en.toml 'data.train=["es-en/train.tsv.xz","es-en/europarl.tsv.xz"]' \
        model.head_layout=pooled model.n_heads=4 model.output_projection=false model.d_ff=608 \
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
from qkv.data.pair_split import Pair
from qkv.data.pairs import PairFile
from qkv.errors import InputError
from qkv.inspection.figures import new_figure
from qkv.tasks import Translator, load_as, translator
from qkv.text.closeness import N_DRAWS, Measured, by_length, closeness, compared

SEARCHES = {"greedy": 1, "beam5": 5}
"""Beams of each search; a file of translations has the search's name."""
ON_GPU = 16_384
"""Source tokens of a batch there: a GPU is idle with as few as a CPU takes."""
COLOURS = ("#737373", "#d95f02", "#08519c", "#6baed6", "#238b45", "#762a83")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of a system's training; None: not known."""

    parameters: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    """Of sources and targets, without padding."""


@dataclass(frozen=True, kw_only=True)
class System:
    """What a system wrote, by search, and what it took."""

    name: str
    written: Mapping[str, Sequence[str]]
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Score:
    """One line of the table."""

    system: System
    measured: Mapping[str, Mapping[str, Measured]]
    """By search, then by metric."""
    by_length: Sequence[Mapping[str, Any]]
    """Of beam 5."""


def trained(folder: Path) -> dict[str, float]:
    """Seconds and tokens a second out of a run's records; nothing for a folder that is no run."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in entries if "tokens" in entry]
    if not steps:
        raise InputError(f"{path}: holds 0 steps of training")
    last = steps[-1]
    return {"seconds": last["seconds"], "tokens_per_second": last["tokens"] / last["seconds"]}


def translate(name: str, folder: Path, sources: list[str], device: torch.device) -> System:
    task = load_as(Translator, folder)
    task.model.to(device)
    parameters = sum(weights.numel() for weights in task.model.parameters())
    written = {}
    for search, beam in SEARCHES.items():
        sys.stderr.write(f"{name}: {search} …\n")
        written[search] = task.translate(sources, beam=beam, split=True)
    return System(name=name, written=written, facts=Facts(parameters=parameters, **trained(folder)))


def keep(system: System, folder: Path) -> None:
    """In the form that `read` takes."""
    stem = re.sub(r"\W+", "-", system.name)
    (folder / f"{stem}.json").write_text(json.dumps(asdict(system.facts), indent=1) + "\n", encoding="utf-8")
    for search, lines in system.written.items():
        (folder / f"{stem}.{search}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(name: str, path: Path) -> System:
    """A system of S.json and the translations beside it."""
    known = json.loads(path.read_text(encoding="utf-8"))
    if "parameters" not in known:
        raise InputError(f"{path}: has no `parameters`")
    facts = Facts(**{fact: known.get(fact) for fact in Facts.__dataclass_fields__})
    written = {
        search: path.with_suffix(f".{search}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for search in SEARCHES
    }
    return System(name=name, written=written, facts=facts)


def scores(systems: Sequence[System], pairs: Sequence[Pair], *, peer: str | None, n_draws: int) -> list[Score]:
    """In the order given; with a peer, each other one is compared with it by paired bootstrap."""
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    for one in systems:
        for search, lines in one.written.items():
            if len(lines) != len(pairs):
                raise InputError(f"{one.name}, {search}: {len(lines)} translations for {len(pairs)} sentences")
    found = {search: _measured(systems, search, references, peer=peer, n_draws=n_draws) for search in SEARCHES}
    return [
        Score(
            system=one,
            measured={search: found[search][one.name] for search in SEARCHES},
            by_length=by_length(sources, one.written["beam5"], references),
        )
        for one in systems
    ]


def _measured(
    systems: Sequence[System], search: str, references: Sequence[str], *, peer: str | None, n_draws: int
) -> dict[str, dict[str, Measured]]:
    written = {one.name: one.written[search] for one in systems}
    if peer is None or len(written) == 1:
        return {name: closeness(lines, references, n_draws=n_draws) for name, lines in written.items()}
    # What is compared with must stand first.
    return compared({peer: written.pop(peer), **written}, references, n_draws=n_draws)


def report(found: Sequence[Score], *, peer: str | None, device: str, load: float) -> Report:
    buckets = [f"{row['words']} words ({row['sentences']:,})" for row in found[0].by_length]
    columns = ["system", "parameters", "trained, s", "tokens/s", "BLEU greedy", "chrF greedy", "BLEU beam 5"]
    signatures = {name: one.signature for name, one in found[0].measured["beam5"].items()}
    against = [] if peer is None else [f"p: of BLEU with beam 5 against {peer}, by paired bootstrap."]
    return Report(
        name="translators",
        what="Spanish into English: closeness to people's translations of sentences that no system was trained on.",
        columns=[*columns, "chrF beam 5", "p", *buckets],
        rows=[_cells(one) for one in found],
        notes=[
            f"Translated with runs on: {device}.",
            "tokens/s: of training, sources and targets, padding not counted. [ , ]: 95 % interval by bootstrap.",
            "By words of the source: BLEU with beam 5 (in brackets how many sentences).",
            *against,
            *(f"{name}: {signature}." for name, signature in signatures.items()),
        ],
        versions={"torch": str(torch.__version__)},
        load=load,
        files={"translators.json": [_plain(one) for one in found]},
    )


def _cells(one: Score) -> list[str]:
    facts = one.system.facts
    chance = one.measured["beam5"]["BLEU"].p_value
    return [
        one.system.name,
        f"{facts.parameters:,}",
        "–" if facts.seconds is None else f"{facts.seconds:.0f}",
        "–" if facts.tokens_per_second is None else f"{facts.tokens_per_second:,.0f}",
        *(_with_interval(one.measured[search][metric]) for search in SEARCHES for metric in ("BLEU", "chrF")),
        "–" if chance is None else f"{chance:.4f}",
        *(f"{row['bleu']:.1f}" for row in one.by_length),
    ]


def _with_interval(one: Measured) -> str:
    return f"{one.score:.2f}" + ("" if one.low is None or one.high is None else f" [{one.low:.1f}, {one.high:.1f}]")


def _plain(one: Score) -> dict[str, Any]:
    measured = {
        search: {name: asdict(metric) for name, metric in metrics.items()} for search, metrics in one.measured.items()
    }
    return {"name": one.system.name, **asdict(one.system.facts), **measured, "by_length": list(one.by_length)}


def draw(found: Sequence[Score], path: Path) -> None:
    """BLEU of each system, and against the length of the source."""
    figure = new_figure(width=10.5, height=4.2)
    whole, lengths = figure.subplots(1, 2, width_ratios=(1, 1.1))
    for place, one in enumerate(found):
        colour = COLOURS[place % len(COLOURS)]
        beam, greedy = (one.measured[search]["BLEU"] for search in ("beam5", "greedy"))
        whole.barh(place, beam.score, color=colour, height=0.6)
        if beam.low is not None and beam.high is not None:
            whole.plot([beam.low, beam.high], [place, place], color="black", linewidth=1.2)
        whole.plot(greedy.score, place, marker="D", color="white", markeredgecolor="black", markersize=5)
        right = max(beam.score, greedy.score, beam.high or 0.0)
        whole.annotate(f"{beam.score:.1f}", (right, place), xytext=(4, 0), textcoords="offset points", va="center")
        bleu = [row["bleu"] for row in one.by_length]
        lengths.plot(range(len(bleu)), bleu, color=colour, marker="o", markersize=4, label=one.system.name)
    whole.set_yticks(range(len(found)), [one.system.name for one in found])
    whole.invert_yaxis()
    whole.margins(x=0.12)
    whole.set_xlim(left=0)
    whole.set_xlabel("BLEU: bar beam 5 with 95 % interval, diamond greedy")
    lengths.set_xticks(
        range(len(found[0].by_length)), [f"{row['words']}\n({row['sentences']:,})" for row in found[0].by_length]
    )
    lengths.set_xlabel("words of the source (sentences)")
    lengths.set_ylabel("BLEU, beam 5")
    lengths.set_ylim(bottom=0)
    lengths.legend(frameon=False, fontsize="small")
    for axis in (whole, lengths):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path)


def found_systems(named: Sequence[str], sources: list[str], out: Path, device: torch.device) -> list[System]:
    systems: list[System] = []
    for one in named:
        name, sign, place = one.partition("=")
        if not sign or not name or not Path(place).exists():
            raise InputError(f"{one}: is not NAME=PLACE, where PLACE is a run's folder or a .json file that exists")
        if Path(place).is_file():
            systems.append(read(name, Path(place)))
        else:
            systems.append(translate(name, Path(place), sources, device))
            keep(systems[-1], out)
    return systems


def run(asked: argparse.Namespace) -> Report:
    load, device = machine.others_load(), torch.device(asked.device)
    names = [one.partition("=")[0] for one in asked.systems]
    if len(set(names)) < len(names):
        raise InputError(f"{len(names)} systems have {len(set(names))} names; each needs its own")
    if asked.peer is not None and asked.peer not in names:
        raise InputError(f"--peer {asked.peer}: is none of the systems ({', '.join(names)})")
    if device.type == "cuda":
        translator.TOKENS_AT_ONCE = ON_GPU
    asked.out.mkdir(parents=True, exist_ok=True)
    pairs = list(PairFile(source=asked.pairs).read())
    systems = found_systems(asked.systems, [source for source, _ in pairs], asked.out, device)
    found = scores(systems, pairs, peer=asked.peer, n_draws=asked.draws)
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine.processor()
    written = report(found, peer=asked.peer, device=name, load=load)
    write_files(written, asked.out)
    draw(found, asked.out / "translators.png")
    return written


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translators", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("systems", nargs="+", metavar="NAME=PLACE")
    parser.add_argument("--pairs", required=True, type=Path, help="source⇥target a line, as es-en/test.tsv")
    parser.add_argument("--out", required=True, type=Path, help="where the figures go")
    parser.add_argument("--peer", help="the NAME of a system that every other one is compared with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draws", type=int, default=N_DRAWS, help="samples of the bootstrap")
    asked = parser.parse_args(given)
    try:
        sys.stdout.write(run(asked).text())
    except InputError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
