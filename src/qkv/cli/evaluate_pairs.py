"""Evaluate translation models with BLEU and chrF for `qkv evaluate --pairs`."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from qkv.cli.options import TEXTS_PER_BATCH, DeviceOptions
from qkv.cli.output import print_status, progress_bar
from qkv.errors import InputError


def evaluate_pairs(
    model: str,
    *,
    pairs: Path,
    against: str | None,
    beam: int,
    limit: int | None,
    device_options: DeviceOptions,
    as_json: bool,
) -> None:
    """Translate the source sentences in a file, and print BLEU and chrF, optionally compared with a second model."""
    from qkv.data.pair_files import PairFile
    from qkv.text.translation_metrics import (
        bleu_by_source_length,
        compare_with_first_system,
        score_translations,
        scores_to_dict,
    )

    all_pairs = list(islice(PairFile(source=pairs).read(), limit))
    complete_pairs = [pair for pair in all_pairs if all(pair)]
    if len(complete_pairs) < len(all_pairs):
        n_ignored = len(all_pairs) - len(complete_pairs)
        print_status(f"ignored {n_ignored:,} of {len(all_pairs):,} lines with an empty side")
    if not complete_pairs:
        raise InputError(f"{pairs}: must contain at least 1 pair, got 0")
    sources, references = [source for source, _ in complete_pairs], [target for _, target in complete_pairs]
    translations = {model: _translate_sources(model, sources, beam, device_options)}
    if against is None:
        scores = {model: score_translations(translations[model], references)}
    else:
        second_name = against if model != against else f"{against} (again)"
        # int8 is not used here so that a quantized model can be compared with its float32 version.
        second_options = replace(device_options, int8=False)
        translations[second_name] = _translate_sources(against, sources, beam, second_options)
        scores = compare_with_first_system(translations, references)
    result = {
        name: {**scores_to_dict(scores[name]), "by_length": bleu_by_source_length(sources, texts, references)}
        for name, texts in translations.items()
    }
    if as_json:
        print(json.dumps({"pairs": len(complete_pairs), "beam": beam, "systems": result}, ensure_ascii=False))
    else:
        _print_translation_scores(result, n_pairs=len(complete_pairs), beam=beam)


def _translate_sources(model: str, sources: list[str], beam: int, device_options: DeviceOptions) -> list[str]:
    from qkv.tasks import Translator

    task = device_options.load_task_as_and_print_remarks(Translator, model)
    translations: list[str] = []
    with progress_bar(f"{model}: translating") as update:
        for start in range(0, len(sources), TEXTS_PER_BATCH // 4):
            translations += task.translate(sources[start : start + TEXTS_PER_BATCH // 4], beam=beam, split=True)
            update(len(translations), len(sources))
    return translations


def _print_translation_scores(result: dict[str, dict[str, Any]], *, n_pairs: int, beam: int) -> None:
    print(f"{n_pairs:,} pairs, beam {beam}")
    for name, system in result.items():
        print(f"\n{name}")
        for metric in ("BLEU", "chrF"):
            score = system[metric]
            interval = f"  95 % interval {score['low']:.2f} … {score['high']:.2f}" if "low" in score else ""
            p_value = f"  p = {score['p_value']:.4f} compared with the first" if "p_value" in score else ""
            print(f"  {metric:5} {score['score']:6.2f}{interval}{p_value}")
            print(f"        {score['signature']}")
        print("        source words   sentences    BLEU")
        for row in system["by_length"]:
            print(f"  {row['words']:>18}   {row['sentences']:9,}  {row['bleu']:6.2f}")
