"""`qkv translate`: a text in another language."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.choices import DType
from qkv.cli.device_options import Device, Dtype, Int8, Place
from qkv.cli.model_argument import Model
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import Translation, TranslationHypothesis, Translator

HEADS_IN_A_ROW = 4
LONGEST_TITLE = 60
"""Characters, before the next line."""
_SPLIT = "Cut long texts at ends of sentences, or never. Unless said, plain output is, if the model has a best length."


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is asked for beside the text."""

    n_best: int
    alignment: bool
    plot: Path | None
    layer: int | None
    split: bool | None
    """None: as the model's training says."""
    as_json: bool

    @property
    def is_plain(self) -> bool:
        return not (self.plot or self.alignment or self.as_json or self.n_best > 1)

    @property
    def needs_attention(self) -> bool:
        return self.alignment or self.plot is not None

    def check(self, texts: list[str] | None) -> None:
        if self.plot is not None:
            from qkv.inspection.figures import check_figure_path

            check_figure_path(self.plot)
        if self.plot is not None and len(texts or []) != 1:
            raise InputError(f"--plot draws one text; {len(texts or [])} were given as arguments")
        if self.layer is not None and self.plot is None:
            raise InputError(f"--layer {self.layer} says what --plot draws: name a file with --plot")
        if self.split and not self.is_plain:
            raise InputError("--split joins the translations of a text's parts: it goes with plain output alone")
        of_best = "--alignment" if self.alignment else None if self.plot is None else "--plot"
        if of_best is not None and self.n_best > 1:
            raise InputError(f"{of_best} is of the best translation, --n-best {self.n_best} asks for more: choose one")


def translate(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    beam: Annotated[int, typer.Option(min=1, metavar="N", help="Running guesses of the search; 1: greedy.")] = 5,
    n_best: Annotated[int, typer.Option(min=1, help="So many translations, best first, with scores.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="A score is Σ log p ÷ length^this.")] = 1.0,
    min_new: Annotated[int, typer.Option(min=0, help="Fewest new tokens.")] = 0,
    max_new: Annotated[int | None, typer.Option(min=1, help="Most; else twice the source's, and 10.")] = None,
    no_repeat: Annotated[int | None, typer.Option(min=1, metavar="N", help="No N tokens in a row twice.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Before each text: words, or a task the model names (T5).")] = None,
    glossary: Annotated[Path | None, typer.Option(help="A line each: term⇥the translation it must have.")] = None,
    split: Annotated[bool | None, typer.Option("--split/--whole", help=_SPLIT, show_default=False)] = None,
    alignment: Annotated[bool, typer.Option("--alignment", help="Add 0-0 1-2: source word-target word.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the attention: .png, .svg or .pdf.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="With --plot: each head of this layer, from 0.")] = None,
    int8: Int8 = False, device: Device = "auto", dtype: Dtype = DType.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text: tokens, scores, n-best.")] = False,
) -> None:  # fmt: skip
    """Translate each text; one without a letter or a digit stays as it is.

    \b
    Examples:
      qkv translate es-en "¿Dónde está la biblioteca?"
      qkv translate es-en "¿Dónde está la biblioteca?" --plot attention.png
      qkv translate es-en "No lo sé." --n-best 5 --json
      qkv translate es-en --alignment < sentences.txt
    """
    from qkv.cli.text_inputs import given_texts
    from qkv.config import BeamConfig

    search = BeamConfig(
        n_beams=max(beam, n_best), n_best=n_best, length_penalty=length_penalty, min_new_tokens=min_new,
        no_repeat_ngram_size=no_repeat,
    )  # fmt: skip
    shown = Shown(n_best=n_best, alignment=alignment, plot=plot, layer=layer, split=split, as_json=as_json)
    shown.check(texts)
    terms = {} if glossary is None else read_glossary(glossary)
    task = _loaded(model, Place(int8=int8, device=device, dtype=dtype), prefix)
    translations = partial(
        task.translate_batch, beam=search, max_new=max_new, glossary=terms, attention=shown.needs_attention
    )
    _remark_blank(texts or [])
    _translate(task, given_texts(texts), translations, shown)


def _loaded(model: str, place: Place, prefix: str | None) -> "Translator":
    from qkv.cli.progress import say
    from qkv.tasks import Translator, load_as

    task = load_as(Translator, model, int8=place.int8, device=place.device, dtype=place.dtype)
    if prefix is not None:
        task = task.with_prefix(prefix)
    for remark in task.remarks:
        say(f"{model}: {remark}")
    return task


def _translate(
    task: "Translator", texts: Iterator[str], translations: Callable[[list[str]], "list[Translation]"], shown: Shown
) -> None:
    """Some thousand at a time, each cut at its sentences where that is asked for."""
    from qkv.cli.progress import say
    from qkv.cli.text_inputs import LINES_AT_ONCE

    is_cut = task.splits_by_default and shown.is_plain if shown.split is None else shown.split
    numbers = count(1)
    while some := list(islice(texts, LINES_AT_ONCE)):
        pieces = [task.split_text(text) if is_cut else [text] for text in some]
        done = iter(translations([piece for own in pieces for piece in own]))
        for text, own in zip(some, pieces, strict=True):
            if shown.split is None and task.splits_by_default and len(own) < (n := len(task.split_text(text))):
                say(f"translated as one, which goes worse than in {n} parts (as plain output is): {text[:60]!r}")
            one = [next(done) for _ in own]
            _remark(next(numbers), one)
            _show(text, one, shown)


def read_glossary(path: Path) -> dict[str, str]:
    from qkv.data.pair_files import PairFile

    pairs = [pair for pair in PairFile(source=path).read() if any(pair)]
    for number, (term, target) in enumerate(pairs, 1):
        if not (term and target):
            raise InputError(f"{path}: entry {number} has a blank side; a glossary's line is term⇥translation")
    return dict(pairs)


def _remark_blank(arguments: list[str]) -> None:
    """Of arguments alone: blank lines between a file's paragraphs are as they should be."""
    from qkv.cli.progress import say
    from qkv.cli.text_inputs import is_blank

    for number, text in enumerate(arguments, 1):
        if is_blank(text):
            say(f"line {number}: is empty")


def _remark(line: int, done: "list[Translation]") -> None:
    """What a reader of the results alone would not see."""
    from qkv.cli.progress import say
    from qkv.generation import FinishReason

    for one in done:
        if one.hypotheses[0].finish_reason is not FinishReason.STOP:
            say(f"cut off after {len(one.hypotheses[0].ids)} tokens, at its limit: {one.source[:60]!r}")
        if one.source_ids and not one.text:
            say(f"line {line}: the model wrote nothing for {one.source[:60]!r}")


def _show(text: str, done: "list[Translation]", shown: Shown) -> None:
    from qkv.cli.progress import say
    from qkv.cli.text_inputs import is_blank

    first = done[0]
    if shown.as_json:
        print(json.dumps(_as_dict(text, first), ensure_ascii=False))
    elif is_blank(text):
        print()
    elif shown.n_best > 1:
        for written in first.hypotheses:
            print(f"{written.score:.4f}\t{written.text}")
    else:
        aligned = "" if first.attention is None or not shown.alignment else f"\t{first.attention.to_pharaoh()}"
        print(" ".join(one.text for one in done) + aligned)
    if shown.plot is not None:
        _draw(first, shown.plot, layer=shown.layer)
        say(f"drawn to {shown.plot}")


def _as_dict(text: str, one: "Translation") -> dict[str, Any]:
    found = {"source": text, "source_tokens": one.source_tokens, **_written(one.hypotheses[0])}
    if len(one.hypotheses) > 1:
        found["found"] = [_written(written) for written in one.hypotheses]
    if one.attention is not None:
        found["alignment"] = one.attention.to_pharaoh()
        found["attention"] = [[round(weight, 6) for weight in row] for row in one.attention.average().tolist()]
    return found


def _written(written: "TranslationHypothesis") -> dict[str, Any]:
    return {
        "text": written.text, "score": written.score, "tokens": written.tokens,
        "log_probabilities": written.log_probabilities, "finish_reason": written.finish_reason,
    }  # fmt: skip


def _draw(one: "Translation", path: Path, *, layer: int | None) -> None:
    from qkv.inspection import plot_heatmaps
    from qkv.inspection.figures import save_figure

    looked = one.attention
    if looked is None:
        raise InputError("there is no attention to draw: the text has no letter or digit")
    said = fill(f"{one.source.strip()} → {one.text}", LONGEST_TITLE)
    n_layers, n_heads = looked.weights.shape[:2]
    if layer is None:
        mean = (
            "" if n_layers == n_heads == 1 else f"layer {looked.best_layer}, which points best: mean of {n_heads} heads"
        )
        figure = plot_heatmaps(looked.to_heatmap(title=mean), title=said)
    else:
        figure = plot_heatmaps(*looked.head_heatmaps(layer), title=said, in_a_row=HEADS_IN_A_ROW)
    save_figure(figure, path)
