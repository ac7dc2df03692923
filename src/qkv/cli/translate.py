"""The `qkv translate` command."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.choices import BackendName, InferenceDType
from qkv.cli.options import (
    TEXTS_PER_BATCH,
    BackendOption,
    DeviceOption,
    DeviceOptions,
    DtypeOption,
    Int8Option,
    ModelArgument,
    is_blank,
    iter_input_texts,
)
from qkv.cli.output import print_status
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import Translation, TranslationHypothesis, Translator

HEATMAPS_PER_ROW = 4
TITLE_WIDTH = 60
"""Maximum number of characters per line in a figure title."""


@dataclass(frozen=True, kw_only=True)
class TranslationOutputOptions:
    """The options of `qkv translate` that determine what is printed."""

    n_best: int
    alignment: bool
    plot: Path | None
    layer: int | None
    split: bool | None
    """Whether to split texts into sentences. If it is None, texts are split if the model was trained on short texts
    (`Translator.splits_by_default`)."""
    as_json: bool

    @property
    def is_plain(self) -> bool:
        return not (self.plot or self.alignment or self.as_json or self.n_best > 1)

    @property
    def needs_attention(self) -> bool:
        return self.alignment or self.plot is not None

    def check(self, texts: list[str] | None) -> None:
        """Raise `InputError` if the given options cannot be combined."""
        if self.plot is not None:
            from qkv.inspection.figures import check_figure_path

            check_figure_path(self.plot)
        if self.plot is not None and len(texts or []) != 1:
            raise InputError(f"--plot requires exactly 1 text as an argument, got {len(texts or [])}")
        if self.layer is not None and self.plot is None:
            raise InputError(f"--layer {self.layer} requires --plot")
        if self.split and not self.is_plain:
            raise InputError("--split cannot be combined with --json, --n-best, --alignment or --plot")
        best_only = "--alignment" if self.alignment else None if self.plot is None else "--plot"
        if best_only is not None and self.n_best > 1:
            raise InputError(
                f"{best_only} applies only to the best translation and cannot be combined with --n-best {self.n_best}"
            )


def translate(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to translate. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    beam: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of beams. A single beam is greedy decoding.")
    ] = 5,
    n_best: Annotated[
        int,
        typer.Option(min=1, help="Print the N best translations of each text. Values above 1 also print the scores."),
    ] = 1,
    length_penalty: Annotated[
        float,
        typer.Option(help="Length penalty: the log probability of a translation is divided by length^X."),
    ] = 1.0,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="Minimum number of new tokens to generate.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of new tokens to generate (default: twice the number of source tokens plus 10)."
        ),
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Generate each n-gram of this size at most once.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Text to prepend to each source text, or the name of a task that the model defines (T5)."),
    ] = None,
    glossary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tab-separated file with one term and its translation per line. The translations must occur in the "
            "output.",
        ),
    ] = None,
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--no-split",
            help="Split long texts into sentences and translate them one by one. By default, texts are split if the "
            "model was trained on short texts and the output is plain text.",
            show_default=False,
        ),
    ] = None,
    alignment: Annotated[
        bool,
        typer.Option(
            "--alignment", help="Append the word alignment as pairs of source and target word, such as 0-0 1-2."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the cross-attention weights (.png, .svg or .pdf).")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Plot each head of this layer (starting at 0). Requires --plot.")
    ] = None,
    int8: Int8Option = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = InferenceDType.FLOAT32,
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, including tokens and scores.")
    ] = False,
) -> None:
    """Translate each text.

    Texts that contain no letters or digits are printed unchanged.

    \b
    Examples:
      qkv translate es-en "¿Dónde está la biblioteca?"
      qkv translate es-en "¿Dónde está la biblioteca?" --plot attention.png
      qkv translate es-en "No lo sé." --n-best 5 --json
      qkv translate es-en --alignment < sentences.txt
    """
    from qkv.config import BeamConfig

    beam_config = BeamConfig(
        n_beams=max(beam, n_best),
        n_best=n_best,
        length_penalty=length_penalty,
        min_new_tokens=min_new_tokens,
        no_repeat_ngram_size=no_repeat_ngram_size,
    )
    output = TranslationOutputOptions(
        n_best=n_best, alignment=alignment, plot=plot, layer=layer, split=split, as_json=as_json
    )
    output.check(texts)
    terms = {} if glossary is None else read_glossary(glossary)
    task = _load_translator_and_print_remarks(
        model, DeviceOptions(int8=int8, device=device, dtype=dtype, backend=backend), prefix
    )
    translate_batch = partial(
        task.translate_batch,
        beam=beam_config,
        max_new=max_new_tokens,
        glossary=terms,
        attention=output.needs_attention,
    )
    _print_blank_argument_warnings(texts or [])
    _translate_and_print_batches(task, iter_input_texts(texts), translate_batch, output)


def _load_translator_and_print_remarks(model: str, device_options: DeviceOptions, prefix: str | None) -> "Translator":
    from qkv.tasks import Translator, load_as

    task = load_as(
        Translator, model, int8=device_options.int8, device=device_options.device, dtype=device_options.dtype
    )
    if prefix is not None:
        task = task.with_task_prefix(prefix)
    for remark in task.remarks:
        print_status(f"{model}: {remark}")
    return task


def _translate_and_print_batches(
    task: "Translator",
    texts: Iterator[str],
    translate_batch: "Callable[[list[str]], list[Translation]]",
    output: TranslationOutputOptions,
) -> None:
    """Translate the texts in batches and print the translations. Texts are split into sentences if requested."""
    is_split = task.splits_by_default and output.is_plain if output.split is None else output.split
    line_numbers = count(1)
    while batch := list(islice(texts, TEXTS_PER_BATCH)):
        parts_per_text = [task.split_to_context_length(text) if is_split else [text] for text in batch]
        translations = iter(translate_batch([part for parts in parts_per_text for part in parts]))
        for text, parts in zip(batch, parts_per_text, strict=True):
            if (
                output.split is None
                and task.splits_by_default
                and len(parts) < (n := len(task.split_to_context_length(text)))
            ):
                print_status(
                    f"the text was not split into its {n} sentences; splitting improves translations but requires "
                    f"plain output: {text[:60]!r}"
                )
            text_translations = [next(translations) for _ in parts]
            _report_truncated_and_empty(next(line_numbers), text_translations)
            _print_translation(text, text_translations, output)


def read_glossary(path: Path) -> dict[str, str]:
    """Read a glossary file with one term and its translation per line, separated by a tab."""
    from qkv.data.pair_files import PairFile

    pairs = [pair for pair in PairFile(source=path).read() if any(pair)]
    for number, (term, target) in enumerate(pairs, 1):
        if not (term and target):
            raise InputError(f"{path}: entry {number} must have a term and a translation, separated by a tab")
    return dict(pairs)


def _print_blank_argument_warnings(arguments: list[str]) -> None:
    """Print a warning about blank texts among the arguments, but not about blank lines of standard input."""
    for number, text in enumerate(arguments, 1):
        if is_blank(text):
            print_status(f"line {number}: the text is blank")


def _report_truncated_and_empty(line_number: int, translations: "list[Translation]") -> None:
    """Print warnings about truncated and empty translations, which users might not notice in the output."""
    from qkv.generation import FinishReason

    for translation in translations:
        source = repr(translation.source[:60])
        if translation.hypotheses[0].finish_reason is not FinishReason.STOP:
            n_tokens = len(translation.hypotheses[0].ids)
            print_status(f"line {line_number}: translation stopped at the limit of {n_tokens} new tokens: {source}")
        if translation.source_ids and not translation.text:
            print_status(f"line {line_number}: the model generated no text for {source}")


def _print_translation(text: str, translations: "list[Translation]", output: TranslationOutputOptions) -> None:
    """Print the translation of a text, given the translations of its parts."""
    first = translations[0]
    if output.as_json:
        print(json.dumps(_translation_to_dict(text, first), ensure_ascii=False))
    elif is_blank(text):
        print()
    elif output.n_best > 1:
        for hypothesis in first.hypotheses:
            print(f"{hypothesis.score:.4f}\t{hypothesis.text}")
    else:
        alignment = "" if first.attention is None or not output.alignment else f"\t{first.attention.to_pharaoh()}"
        print(" ".join(translation.text for translation in translations) + alignment)
    if output.plot is not None:
        _plot_cross_attention(first, output.plot, layer=output.layer)
        print_status(f"saved the figure to {output.plot}")


def _translation_to_dict(text: str, translation: "Translation") -> dict[str, Any]:
    hypotheses = [_hypothesis_to_dict(hypothesis) for hypothesis in translation.hypotheses]
    result = {"source": text, "source_tokens": translation.source_tokens, **hypotheses[0]}
    if len(hypotheses) > 1:
        result["hypotheses"] = hypotheses
    if translation.attention is not None:
        result["alignment"] = translation.attention.to_pharaoh()
        weights = translation.attention.average().tolist()
        result["attention"] = [[round(weight, 6) for weight in row] for row in weights]
    return result


def _hypothesis_to_dict(hypothesis: "TranslationHypothesis") -> dict[str, Any]:
    return {
        "text": hypothesis.text,
        "score": hypothesis.score,
        "tokens": hypothesis.tokens,
        "log_probabilities": hypothesis.log_probabilities,
        "finish_reason": hypothesis.finish_reason,
    }


def _plot_cross_attention(translation: "Translation", path: Path, *, layer: int | None) -> None:
    """Save heatmaps of the cross-attention weights.

    By default, save one heatmap of the best-aligned layer, averaged over heads. If a layer is given, save one heatmap
    for each of its heads.
    """
    from qkv.inspection import plot_heatmaps
    from qkv.inspection.figures import save_figure

    attention = translation.attention
    if attention is None:
        raise InputError("--plot requires a text with at least 1 letter or digit")
    title = fill(f"{translation.source.strip()} → {translation.text}", TITLE_WIDTH)
    n_layers, n_heads = attention.weights.shape[:2]
    if layer is None:
        subtitle = ""
        if not n_layers == n_heads == 1:
            subtitle = f"layer {attention.best_layer} (sharpest alignment), mean of {n_heads} heads"
        figure = plot_heatmaps(attention.to_heatmap(title=subtitle), title=title)
    else:
        figure = plot_heatmaps(*attention.head_heatmaps(layer), title=title, per_row=HEATMAPS_PER_ROW)
    save_figure(figure, path)
