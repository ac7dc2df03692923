"""The `qkv inspect` command."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import AttentionStack, ViewKind
from qkv.cli.options import ModelArgument, is_blank, iter_input_texts
from qkv.cli.output import print_status
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.inspection import ActivationCache, Intervention, ModelInput, TokenizedText, View
    from qkv.tasks import Task


MIN_TIMELINE_CHECKPOINTS = 5
"""Minimum number of checkpoints for an informative timeline. With fewer checkpoints, a hint is printed."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `qkv inspect`."""

    model: str
    view: ViewKind
    target: str | None
    stack: AttentionStack | None
    layer: int | None
    head: int | None
    query: str | None
    words: bool
    no_sink: bool
    pronoun: str
    candidates: list[str]
    top_k: int
    ablated_heads: list[str]
    masked_edges: list[str]


def inspect(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to inspect. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    view: Annotated[ViewKind, typer.Option(help="View to show.")] = ViewKind.HEADS,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save a figure (.png, .svg or .pdf) instead of printing a table."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="For a translator, the translation of the text (default: the model's own translation). For a BERT, "
            "the second text of a pair."
        ),
    ] = None,
    stack: Annotated[
        AttentionStack | None, typer.Option(help="Attention stack to inspect, for models that have several.")
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Layer for the map and neuron views, starting at 0. By default, the map view shows the mean over all "
            "layers.",
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Head for the map and neuron views, starting at 0. By default, the map view shows the mean over all "
            "heads.",
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            help="Query token for the neuron, logit-attribution and effect views: a word or position (default: the "
            "last position)."
        ),
    ] = None,
    words: Annotated[bool, typer.Option("--words", help="Merge the tokens of each word in the map view.")] = False,
    no_sink: Annotated[
        bool,
        typer.Option(
            "--no-sink", help="Exclude the first token and special tokens (attention sinks) from the map view."
        ),
    ] = False,
    pronoun: Annotated[str, typer.Option("--pronoun", metavar="WORD", help="Pronoun for the coreference view.")] = "it",
    candidates: Annotated[
        str,
        typer.Option(metavar="A,B", help="Words that the pronoun may refer to. Required for the coreference view."),
    ] = "",
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            "-n",
            min=1,
            help="Number of predictions or neighbors in the logit-lens, embeddings and effect views.",
        ),
    ] = 5,
    ablate_head: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER.HEAD", help="Set the output of this head to zero. Can be given multiple times."),
    ] = None,
    mask_edge: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY:KEY",
            help="Prevent this query from attending to this key in all layers. Can be given multiple times.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, including all values.")
    ] = False,
) -> None:
    """Inspect the activations of a model on a text, as a table or, with --plot, as a figure.

    \b
    Views:
      heads              attention pattern of each head (previous token, induction, ...)
      map                attention weights of a head, or averaged
      neuron             computation of the attention weights of one query
      residual           norms of the residual stream and of each sub-layer's output
      logit-lens         most likely tokens after each layer
      coreference        four estimates of which candidate a pronoun refers to
      embeddings         nearest tokens of each token's vector, and how it changes
      logit-attribution  contribution of each head and feed-forward to a logit
      effect             effect of --ablate-head and --mask-edge on the predictions
      timeline           attention patterns at every checkpoint of a run

    A token is specified by a word or by its position, starting at 0. In a translation, a word refers to the position
    that has this word as its input. In views of predictions, it refers to the position that predicted the word.

    \b
    Examples:
      qkv inspect stories "Once upon a time there was a dog." --plot heads.png
      qkv inspect stories "The dog ran." --view map --layer 1 --head 2
      qkv inspect bert "The dog saw the cat as it ran." --view coreference --candidates dog,cat
      qkv inspect stories "The dog ran to the" --view logit-lens --json
      qkv inspect stories "The dog ran to the" --view effect --ablate-head 1.2 --mask-edge 4:1
      qkv inspect es-en "Me gusta el té." --view map --stack cross --plot cross.pdf
      qkv inspect es-en "Me gusta el té." --view effect --stack cross --mask-edge like:gusta --query like
      qkv inspect runs/1 "Once upon a time" --view timeline --plot learning.png
    """
    options = InspectOptions(
        model=model,
        view=view,
        target=target,
        stack=stack,
        layer=layer,
        head=head,
        query=query,
        words=words,
        no_sink=no_sink,
        pronoun=pronoun,
        candidates=[word.strip() for word in candidates.split(",") if word.strip()],
        top_k=top_k,
        ablated_heads=ablate_head or [],
        masked_edges=mask_edge or [],
    )
    _check_inspect_options(options, plot, texts)

    task = None if view is ViewKind.TIMELINE else _load_task_and_print_remarks(model)
    for number, text in enumerate(iter_input_texts(texts)):
        if is_blank(text) and plot is not None:
            raise InputError("--plot requires a text that is not blank")
        if is_blank(text):
            print(json.dumps({"view": view.value, "text": text}) if as_json else "")
            continue
        result, changes = (
            (_build_checkpoint_timeline(options, text), [])
            if task is None
            else _build_view_and_describe_changes(task, options, text)
        )
        if plot is not None:
            _plot_to_file(result, text, changes, plot)
        elif as_json:
            _print_view_json(result, {"view": view.value, "text": text} | ({"changes": changes} if changes else {}))
        else:
            _print_view_table(result, changes, is_first=number == 0)


def _print_view_json(view: "View", header: dict[str, str | list[str]]) -> None:
    from qkv.inspection import to_jsonable

    print(json.dumps({**header, **to_jsonable(view)}, ensure_ascii=False))


def _print_view_table(view: "View", changes: list[str], *, is_first: bool) -> None:
    from qkv.cli.inspect_tables import print_view

    if not is_first:
        print()
    print_view(view, changes)


def _check_inspect_options(options: InspectOptions, plot: Path | None, texts: list[str] | None) -> None:
    """Raise `InputError` if the given options cannot be combined."""
    n_changes = len(options.ablated_heads) + len(options.masked_edges)
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
        if len(texts or []) != 1:
            raise InputError(f"--plot requires exactly 1 text as an argument, got {len(texts or [])}")
    if n_changes and options.view in (ViewKind.TIMELINE, ViewKind.COREFERENCE):
        raise InputError(
            f"--view {options.view} cannot be combined with --ablate-head or --mask-edge ({n_changes} given)"
        )
    if options.view is ViewKind.COREFERENCE and len(options.candidates) < 2:
        raise InputError(f"--view coreference requires at least 2 words in --candidates, got {len(options.candidates)}")
    if options.view is ViewKind.EFFECT and not n_changes:
        raise InputError("--view effect requires --ablate-head or --mask-edge")


def _load_task_and_print_remarks(model: str) -> "Task":
    from qkv.tasks import TextEncoder, load

    task = load(model)
    if isinstance(task, TextEncoder):
        for remark in task.remarks:
            print_status(f"{model}: {remark}")
    return task


def _prepare_model_input(task: "Task", options: InspectOptions, text: str) -> "ModelInput":
    """Tokenize the text and, if the model is a translator, the translation."""
    from qkv.inspection import prepare_input
    from qkv.tasks import Translator

    if not isinstance(task, Translator):
        return prepare_input(task, text, options.target)
    if not (source := task.normalize_and_add_prefix(text)):
        raise InputError(f"{text!r} contains 0 words, at least 1 is required")
    return prepare_input(task, source, options.target or task.translate_batch([text])[0].hypotheses[0].ids)


def _build_view_and_describe_changes(task: "Task", options: InspectOptions, text: str) -> "tuple[View, list[str]]":
    """Run the model on a text, and return the view and descriptions of interventions that are not part of the view."""
    from qkv.inspection import (
        apply_interventions,
        coreference,
        find_ineffective_masks,
        measure_effect,
        run_with_cache,
    )
    from qkv.inspection.interventions import describe_intervention

    if options.view is ViewKind.COREFERENCE:
        return coreference(task, text, pronoun=options.pronoun, candidates=options.candidates), []
    model_input = _prepare_model_input(task, options, text)
    interventions = list(_parse_interventions(task, options, model_input))
    for mask in find_ineffective_masks(task.model, model_input, interventions):
        reason = "which comes later" if mask.key > mask.query else "which is outside its sliding window"
        print_status(
            f"--mask-edge {mask.query}:{mask.key} has no effect: token {mask.query} never attends to token {mask.key}, "
            f"{reason}"
        )
    if options.view is ViewKind.EFFECT:
        position = _parse_position_or_word(model_input.prediction_tokens, options.query)
        return (
            measure_effect(task.model, task.tokenizer, model_input, interventions, position=position, n=options.top_k),
            [],
        )
    with apply_interventions(task.model, interventions):
        cache = run_with_cache(task.model, model_input)
    changes = [describe_intervention(intervention, model_input) for intervention in interventions]
    return _compute_view_from_activations(task, options, cache), changes


def _compute_view_from_activations(task: "Task", options: InspectOptions, cache: "ActivationCache") -> "View":
    """Compute the selected view from the activations."""
    from qkv.inspection import (
        classify_heads,
        compute_neuron_view,
        embedding_trajectories,
        logit_attribution,
        logit_lens,
        residual_stream_norms,
    )

    stack = options.stack
    if stack is None and options.view is ViewKind.MAP and AttentionStack.CROSS in cache.stacks:
        stack = AttentionStack.CROSS
    is_prediction = options.view is ViewKind.LOGIT_ATTRIBUTION or not cache.stacks
    query_tokens = (
        cache.model_input.prediction_tokens if is_prediction else cache.attention_axis_tokens(stack or cache.stacks[0])
    )
    query = _parse_position_or_word(query_tokens, options.query)
    match options.view:
        case ViewKind.HEADS:
            view = classify_heads(cache, stack)
        case ViewKind.MAP:
            view = _build_attention_map(cache, options, stack)
        case ViewKind.NEURON:
            view = compute_neuron_view(cache, stack, layer=options.layer or 0, head=options.head or 0, query=query)
        case ViewKind.RESIDUAL:
            view = residual_stream_norms(cache, stack)
        case ViewKind.LOGIT_LENS:
            view = logit_lens(cache, task.tokenizer, n=options.top_k)
        case ViewKind.EMBEDDINGS:
            view = embedding_trajectories(cache, task.tokenizer, n=options.top_k)
        case _:
            best = 0 if cache.logits is None else int(cache.logits[query, : task.tokenizer.vocab_size].argmax())
            view = logit_attribution(cache, task.tokenizer, position=query, token_id=best)
    return view


def _build_attention_map(cache: "ActivationCache", options: InspectOptions, stack: AttentionStack | None) -> "View":
    from qkv.inspection import attention_map
    from qkv.inspection.attention_map import refine_map

    stack = stack or cache.stacks[0]
    view = attention_map(cache, stack, layer=options.layer, head=options.head)
    queries, keys = cache.attention_axis_tokens(stack), cache.attention_axis_tokens(stack, is_key=True)
    return refine_map(view, queries, keys, merge_words=options.words, keep_sink=not options.no_sink)


def _parse_interventions(task: "Task", options: InspectOptions, model_input: "ModelInput") -> "Iterator[Intervention]":
    """Yield the interventions that --ablate-head and --mask-edge specify."""
    from qkv.inspection import EdgeMask, HeadAblation
    from qkv.models import RNNSeq2Seq
    from qkv.tasks import Translator

    if isinstance(task.model, RNNSeq2Seq):
        default_stack = AttentionStack.CROSS
    else:
        default_stack = AttentionStack.DECODER if isinstance(task, Translator) else AttentionStack.SELF
    stack = options.stack or default_stack
    queries, keys = (model_input.attention_axis_tokens(stack, is_key=is_key) for is_key in (False, True))
    for value in options.ablated_heads:
        layer, dot, head = value.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise InputError(f"--ablate-head {value}: must have the form LAYER.HEAD, such as 1.2")
        yield HeadAblation(stack=stack, layer=int(layer), head=int(head))
    for value in options.masked_edges:
        query, colon, key = value.partition(":")
        if not colon:
            raise InputError(f"--mask-edge {value}: must have the form QUERY:KEY (words or positions), such as 4:1")
        yield EdgeMask(
            stack=stack, query=_parse_position_or_word(queries, query), key=_parse_position_or_word(keys, key)
        )


def _parse_position_or_word(tokens: "TokenizedText", value: str | None) -> int:
    """Parse a position, which is given as a number or a word, and return it. The default is the last position.

    For a word with several tokens, return the position of the last token.
    """
    from qkv.inspection.validation import check_index

    n = len(tokens.ids)
    if value is None:
        return n - 1
    position = int(value) if value.isdecimal() else tokens.find_last_occurrence(value)[-1]
    return check_index("position", position, n, unit="tokens")


def _build_checkpoint_timeline(options: InspectOptions, text: str) -> "View":
    from qkv.inspection import checkpoint_timeline
    from qkv.tasks import load
    from qkv.training.checkpoint import RunFolder

    run = RunFolder(Path(options.model))
    steps = run.checkpoint_steps()
    if not steps:
        raise InputError(f"{options.model}: --view timeline requires a run folder with checkpoints")
    if len(steps) < MIN_TIMELINE_CHECKPOINTS:
        n_checkpoints = f"{len(steps)} checkpoint{'s' * (len(steps) != 1)}"
        print_status(
            f"{options.model}: the timeline has only {n_checkpoints}; to keep more, increase training.keep_checkpoints "
            "in the recipe"
        )
    checkpoints = ((step, load(run.checkpoint_folder(step))) for step in steps)
    return checkpoint_timeline(checkpoints, text, options.target, stack=options.stack)


def _plot_to_file(view: "View", text: str, changes: list[str], path: Path) -> None:
    from qkv.inspection import plot_view
    from qkv.inspection.figures import save_figure

    save_figure(plot_view(view, title=text, changes=changes), path)
    print_status(f"saved the figure to {path}")
