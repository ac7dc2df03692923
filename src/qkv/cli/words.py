"""The `qkv words` command."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.options import DeviceOption, DeviceOptions, ModelArgument, escape_newlines, is_blank, iter_input_texts
from qkv.errors import InputError


def words(
    model: ModelArgument,
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD", help="Two or more words. By default, words are read from standard input, one per line."
        ),
    ] = None,
    *,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Save a 2D map of the words to this file.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per word, including its similarity and distance to every word."
        ),
    ] = False,
) -> None:
    """Compare words by their vectors.

    For each word, prints the nearest other word by cosine similarity, the cosine similarity and the Euclidean distance.
    A word given on its own is represented by its row of the embedding matrix (a static vector). A word marked with [ ]
    in a sentence is represented by its hidden state after the last layer (a contextual vector). If a word has several
    tokens, their vectors are averaged. Blank lines are ignored.

    \b
    Examples:
      qkv words stories king queen dog cat run walk --plot words.png
      qkv words stories "He sat by the [light]." "The box was very [light]." light
    """
    from qkv.inspection.figures import check_figure_path, save_figure
    from qkv.tasks import LanguageModel, TextEncoder
    from qkv.tasks.word_vectors import word_vectors

    if plot is not None:
        check_figure_path(plot)
    inputs = [item for item in iter_input_texts(items) if not is_blank(item)]
    if len(inputs) < 2:
        raise InputError(f"at least 2 words are required, got {len(inputs)}")
    task = DeviceOptions(device=device).load_task_and_print_remarks(model)
    if not isinstance(task, LanguageModel | TextEncoder):
        raise InputError(f"{model}: must be a GPT or BERT model, got {task!r}")
    vectors = word_vectors(task, inputs)
    cosines, distances = vectors.cosine.tolist(), vectors.euclidean.tolist()
    for i, item in enumerate(inputs):
        if as_json:
            word = {"word": vectors.words[i], "input": item, "contextual": vectors.is_contextual[i]}
            print(json.dumps({**word, "cosine": cosines[i], "euclidean": distances[i]}, ensure_ascii=False))
        else:
            nearest = max((other for other in range(len(inputs)) if other != i), key=cosines[i].__getitem__)
            print(
                f"{escape_newlines(item)}\t{escape_newlines(inputs[nearest])}\t{cosines[i][nearest]:.4f}"
                f"\t{distances[i][nearest]:.4f}"
            )
    if plot is not None:
        from qkv.inspection.word_map import plot_word_map

        kinds = ["in its sentence" if is_contextual else "embedding matrix" for is_contextual in vectors.is_contextual]
        groups = kinds if len(set(kinds)) > 1 else ()
        save_figure(plot_word_map(vectors.vectors, inputs, groups=groups, title=f"Words of {model}"), plot)
