"""`qkv look`: what happens inside while a text is read?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import AttentionKind, ViewKind
from qkv.cli.model_argument import Model
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.inspection import ActivationCache, Intervention, ModelInput, TokenizedText, View
    from qkv.tasks import Task


FEW_POINTS = 5
"""Of a timeline."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the options say."""

    model: str
    view: ViewKind
    target: str | None
    stack: AttentionKind | None
    layer: int | None
    head: int | None
    query: str | None
    words: bool
    no_sink: bool
    it: str
    candidates: list[str]
    n: int
    off: list[str]
    cut: list[str]


def look(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(help="None: one a line from stdin.")] = None,
    *,
    view: Annotated[ViewKind, typer.Option(help="What to show.")] = ViewKind.HEADS,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    target: Annotated[str | None, typer.Option(help="The translation (else the model's), or BERT's text B.")] = None,
    stack: Annotated[AttentionKind | None, typer.Option(help="Which attentions, where a model has several.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="map, neuron: from 0; map: else the mean.")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="As --layer.")] = None,
    query: Annotated[str | None, typer.Option(help="neuron, logit, effect: a word, or its place.")] = None,
    words: Annotated[bool, typer.Option("--words", help="map: words for tokens.")] = False,
    no_sink: Annotated[bool, typer.Option("--no-sink", help="map: leave out first and special tokens.")] = False,
    it: Annotated[str, typer.Option("--it", metavar="WORD", help="it: the word that refers.")] = "it",
    candidates: Annotated[str, typer.Option(metavar="A,B", help="it, needed there: the words it may refer to.")] = "",
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="lens, embeddings, effect: so many guesses.")] = 5,
    off: Annotated[list[str] | None, typer.Option(metavar="LAYER.HEAD", help="Switch this head off.")] = None,
    cut: Annotated[list[str] | None, typer.Option(metavar="QUERY:KEY", help="Cut this look, in all layers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text, with all numbers.")] = False,
) -> None:  # fmt: skip
    """Look inside: a table of what is seen, or a picture with --plot.

    Heads are named by what they look at. `it` compares four answers to what a word refers to; `logit` parts the
    last guess's logit into what each head and feed-forward added; `effect` shows what --off and --cut change;
    `timeline` reads the text with every checkpoint of a run. Places of tokens are counted from 0.
    A word of a translation means the row that a map names by it; where guesses are made, the place that chose it.

    \b
    Examples:
      qkv look stories "Once upon a time there was a dog." --plot heads.png
      qkv look stories "The dog ran." --view map --layer 1 --head 2
      qkv look stories "The animal didn't cross the street as it was tired." --view it --candidates animal,street
      qkv look stories "The dog ran to the" --view lens --json
      qkv look stories "The dog ran to the" --view effect --off 1.2 --cut 4:1
      qkv look es-en "Me gusta el té." --view map --stack cross --plot cross.pdf
      qkv look es-en "Me gusta el té." --view effect --stack cross --cut like:gusta --query like
      qkv look runs/1 "Once upon a time" --view timeline --plot learning.png
    """
    asked = Asked(
        model=model, view=view, target=target, stack=stack, layer=layer, head=head, query=query, words=words,
        no_sink=no_sink, it=it, candidates=[word.strip() for word in candidates.split(",") if word.strip()], n=n,
        off=off or [], cut=cut or [],
    )  # fmt: skip
    _check(asked, plot, texts)
    from qkv.cli.text_inputs import given_texts, is_blank

    task = None if view is ViewKind.TIMELINE else _load(model)
    for number, text in enumerate(given_texts(texts)):
        if is_blank(text) and plot is not None:
            raise InputError("there is nothing to draw: the text is blank")
        if is_blank(text):
            print(json.dumps({"view": view.value, "text": text}) if as_json else "")
            continue
        shown, changes = (_timeline(asked, text), []) if task is None else _view(task, asked, text)
        if plot is not None:
            _draw(shown, text, changes, plot)
        elif as_json:
            _print_json(shown, {"view": view.value, "text": text} | ({"changes": changes} if changes else {}))
        else:
            _print(shown, changes, is_first=number == 0)


def _print_json(shown: "View", asked: dict[str, str | list[str]]) -> None:
    from qkv.inspection import to_jsonable

    print(json.dumps({**asked, **to_jsonable(shown)}, ensure_ascii=False))


def _print(shown: "View", changes: list[str], *, is_first: bool) -> None:
    from qkv.cli.inspect_tables import print_view

    if not is_first:
        print()
    print_view(shown, changes)


def _check(asked: Asked, plot: Path | None, texts: list[str] | None) -> None:
    changed = asked.off + asked.cut
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
        if len(texts or []) != 1:
            raise InputError(f"--plot draws one text; {len(texts or [])} were given as arguments")
    if changed and asked.view in (ViewKind.TIMELINE, ViewKind.IT):
        raise InputError(f"--view {asked.view} takes no --off and no --cut; {len(changed)} were given")
    if asked.view is ViewKind.IT and len(asked.candidates) < 2:
        raise InputError(f"--view it compares at least 2 words, and --candidates A,B names {len(asked.candidates)}")
    if asked.view is ViewKind.EFFECT and not changed:
        raise InputError("--view effect shows what a change does; give at least 1 --off or --cut")


def _load(model: str) -> "Task":
    from qkv.cli.progress import say
    from qkv.tasks import TextEncoder, load

    task = load(model)
    if isinstance(task, TextEncoder):
        for remark in task.remarks:
            say(f"{model}: {remark}")
    return task


def _read(task: "Task", asked: Asked, text: str) -> "ModelInput":
    from qkv.inspection import prepare_input
    from qkv.tasks import Translator

    if not isinstance(task, Translator):
        return prepare_input(task, text, asked.target)
    if not (given := task.prepare_source(text)):
        raise InputError(f"{text!r} has 0 words, there must be at least 1")
    return prepare_input(task, given, asked.target or task.translate_batch([text])[0].hypotheses[0].ids)


def _view(task: "Task", asked: Asked, text: str) -> "tuple[View, list[str]]":
    """With what was changed, in words, where the view does not hold it."""
    from qkv.cli.progress import say
    from qkv.inspection import apply_interventions, coreference, find_ineffective_masks, measure_effect, run_with_cache
    from qkv.inspection.interventions import describe_intervention

    if asked.view is ViewKind.IT:
        return coreference(task, text, pronoun=asked.it, candidates=asked.candidates), []
    reading = _read(task, asked, text)
    changes = list(_changes(task, asked, reading))
    for one in find_ineffective_masks(task.model, reading, changes):
        why = "comes after it" if one.key > one.query else "lies outside its window"
        say(f"--cut {one.query}:{one.key} changes nothing: token {one.query} never looks at {one.key}, which {why}")
    if asked.view is ViewKind.EFFECT:
        place = _place(reading.prediction_tokens, asked.query)
        return measure_effect(task.model, task.tokenizer, reading, changes, position=place, n=asked.n), []
    with apply_interventions(task.model, changes):
        seen = run_with_cache(task.model, reading)
    return _seen(task, asked, seen), [describe_intervention(one, reading) for one in changes]


def _seen(task: "Task", asked: Asked, seen: "ActivationCache") -> "View":
    from qkv.inspection import (
        classify_heads,
        compute_neuron_view,
        embedding_trajectories,
        logit_attribution,
        logit_lens,
        residual_stream_norms,
    )

    stack = asked.stack or (AttentionKind.CROSS if AttentionKind.CROSS in seen.stacks and asked.view is ViewKind.MAP else None)
    is_guess = asked.view is ViewKind.LOGIT or not seen.stacks
    query = _place(seen.model_input.prediction_tokens if is_guess else seen.select_tokens(stack or seen.stacks[0]), asked.query)
    match asked.view:
        case ViewKind.HEADS:
            found = classify_heads(seen, stack)
        case ViewKind.MAP:
            found = _map(seen, asked, stack)
        case ViewKind.NEURON:
            found = compute_neuron_view(seen, stack, layer=asked.layer or 0, head=asked.head or 0, query=query)
        case ViewKind.RESIDUAL:
            found = residual_stream_norms(seen, stack)
        case ViewKind.LENS:
            found = logit_lens(seen, task.tokenizer, n=asked.n)
        case ViewKind.EMBEDDINGS:
            found = embedding_trajectories(seen, task.tokenizer, n=asked.n)
        case _:
            best = 0 if seen.logits is None else int(seen.logits[query, : task.tokenizer.vocab_size].argmax())
            found = logit_attribution(seen, task.tokenizer, position=query, token_id=best)
    return found


def _map(seen: "ActivationCache", asked: Asked, stack: AttentionKind | None) -> "View":
    from qkv.inspection import attention_map
    from qkv.inspection.attention_map import refine_map

    stack = stack or seen.stacks[0]
    found = attention_map(seen, stack, layer=asked.layer, head=asked.head)
    sides = seen.select_tokens(stack), seen.select_tokens(stack, is_key=True)
    return refine_map(found, *sides, words=asked.words, sink=not asked.no_sink)


def _changes(task: "Task", asked: Asked, reading: "ModelInput") -> "Iterator[Intervention]":
    from qkv.inspection import EdgeMask, HeadAblation
    from qkv.models import RNNSeq2Seq
    from qkv.tasks import Translator

    own = AttentionKind.DECODER if isinstance(task, Translator) else AttentionKind.SELF
    stack = asked.stack or (AttentionKind.CROSS if isinstance(task.model, RNNSeq2Seq) else own)
    queries, keys = (reading.select_tokens(stack, is_key=is_key) for is_key in (False, True))
    for given in asked.off:
        layer, dot, head = given.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise InputError(f"--off {given}: a head is written LAYER.HEAD, such as 1.2")
        yield HeadAblation(stack=stack, layer=int(layer), head=int(head))
    for given in asked.cut:
        one, colon, other = given.partition(":")
        if not colon:
            raise InputError(f"--cut {given}: a look is written QUERY:KEY, two words or places, such as 4:1")
        yield EdgeMask(stack=stack, query=_place(queries, one), key=_place(keys, other))


def _place(tokens: "TokenizedText", given: str | None) -> int:
    """A place as a number, or the last token of a word; none: the last of all."""
    from qkv.inspection.validation import check_index

    n = len(tokens.ids)
    if given is None:
        return n - 1
    place = int(given) if given.isdecimal() else tokens.find_word(given)[-1]
    return check_index("place", place, n, of="tokens")


def _timeline(asked: Asked, text: str) -> "View":
    from qkv.cli.progress import say
    from qkv.inspection import checkpoint_timeline
    from qkv.tasks import load
    from qkv.training.run_folder import RunFolder

    run = RunFolder(Path(asked.model))
    steps = run.checkpoint_steps()
    if not steps:
        raise InputError(f"{asked.model}: holds no checkpoints; --view timeline needs the folder of a run")
    if len(steps) < FEW_POINTS:
        left = "1 checkpoint is" if len(steps) == 1 else f"{len(steps)} checkpoints are"
        say(f"{asked.model}: {left} left to look at; a recipe's training.keep_checkpoints says how many stay")
    return checkpoint_timeline(((step, load(run.checkpoint_folder(step))) for step in steps), text, asked.target, stack=asked.stack)


def _draw(shown: "View", text: str, changes: list[str], plot: Path) -> None:
    from qkv.cli.progress import say
    from qkv.inspection import plot_view
    from qkv.inspection.figures import save_figure

    save_figure(plot_view(shown, title=text, changes=changes), plot)
    say(f"drawn to {plot}")
