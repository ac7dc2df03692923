"""`qkv evaluate --pairs`: how near a model's translations are to people's, and whether another's are nearer."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from qkv.cli.device_options import Place
from qkv.cli.progress import bar, say
from qkv.errors import InputError


def evaluate_pairs(
    model: str, *, pairs: Path, against: str | None, beam: int, limit: int | None, place: Place,
    as_json: bool,
) -> None:  # fmt: skip
    from qkv.data.pair_files import PairFile
    from qkv.text.translation_metrics import bleu_by_source_length, compare_systems, score_translations, scores_to_dict

    read = list(islice(PairFile(source=pairs).read(), limit))
    both = [pair for pair in read if all(pair)]
    if len(both) < len(read):
        say(f"{len(read) - len(both):,} of {len(read):,} lines have a blank side and are left out")
    if not both:
        raise InputError(f"{pairs}: holds 0 pairs; at least 1 is needed")
    sources, references = [source for source, _ in both], [target for _, target in both]
    if against is None:
        systems = {model: _translated(model, sources, beam, place)}
        found = {model: score_translations(systems[model], references)}
    else:
        names = (model, against) if model != against else (model, f"{against} (again)")
        other = replace(place, int8=False)  # so that a model can be compared with itself in float32
        systems = {
            names[0]: _translated(model, sources, beam, place), names[1]: _translated(against, sources, beam, other)
        }  # fmt: skip
        found = compare_systems(systems, references)
    result = {
        name: {**scores_to_dict(found[name]), "by_length": bleu_by_source_length(sources, written, references)}
        for name, written in systems.items()
    }
    if as_json:
        print(json.dumps({"pairs": len(both), "beam": beam, "systems": result}, ensure_ascii=False))
    else:
        _print(result, n_pairs=len(both), beam=beam)


def _translated(model: str, sources: list[str], beam: int, place: Place) -> list[str]:
    from qkv.cli.text_inputs import LINES_AT_ONCE
    from qkv.tasks import Translator

    task = place.load_as(Translator, model)
    written: list[str] = []
    with bar(f"{model} translates") as move:
        for start in range(0, len(sources), LINES_AT_ONCE // 4):
            written += task.translate(sources[start : start + LINES_AT_ONCE // 4], beam=beam, split=True)
            move(len(written), len(sources))
    return written


def _print(result: dict[str, dict[str, Any]], *, n_pairs: int, beam: int) -> None:
    print(f"{n_pairs:,} pairs, beam {beam}")
    for name, measured in result.items():
        print(f"\n{name}")
        for metric in ("BLEU", "chrF"):
            one = measured[metric]
            interval = f"  95 % interval {one['low']:.2f} … {one['high']:.2f}" if "low" in one else ""
            chance = f"  p = {one['p_value']:.4f} against the first" if "p_value" in one else ""
            print(f"  {metric:5} {one['score']:6.2f}{interval}{chance}")
            print(f"        {one['signature']}")
        print("  words of the source   sentences    BLEU")
        for row in measured["by_length"]:
            print(f"  {row['words']:>19}   {row['sentences']:9,}  {row['bleu']:6.2f}")
