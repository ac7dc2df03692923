"""`qkv words`: which words lie near each other?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.device_options import Device, Place
from qkv.cli.model_argument import Model
from qkv.errors import InputError


def words(
    model: Model,
    items: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="At least 2; none: one a line from stdin.")
    ] = None,
    *,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the words as a map.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a word, with all its distances.")] = False,
) -> None:
    """Compare words as vectors: of each word the nearest other one, by cosine, with cosine and Euclidean distance.

    A word alone is static: its row of the token table. A word marked with [ ] in a sentence is contextual: its
    state after the last layer there. A word of several tokens is their mean. Blank lines are passed over.

    \b
    Examples:
      qkv words stories king queen dog cat run walk --plot words.png
      qkv words stories "He sat by the [light]." "The box was very [light]." light
    """
    from qkv.cli.text_inputs import given_texts, in_a_line, is_blank
    from qkv.inspection.figures import check_figure_path, save_figure
    from qkv.tasks import LanguageModel, TextEncoder
    from qkv.tasks.word_vectors import word_vectors

    if plot is not None:
        check_figure_path(plot)
    wanted = [item for item in given_texts(items) if not is_blank(item)]
    if len(wanted) < 2:
        raise InputError(f"words given: {len(wanted)}; at least 2 can be compared")
    task = Place(device=device).load(model)
    if not isinstance(task, LanguageModel | TextEncoder):
        raise InputError(f"{model}: words are compared in a GPT or a BERT, not in {task!r}")
    found = word_vectors(task, wanted)
    cosines, distances = found.cosine.tolist(), found.euclidean.tolist()
    for place, item in enumerate(wanted):
        if as_json:
            said = {"word": found.words[place], "given": item, "contextual": found.is_contextual[place]}
            print(json.dumps({**said, "cosine": cosines[place], "euclid": distances[place]}, ensure_ascii=False))
        else:
            near = max((other for other in range(len(wanted)) if other != place), key=cosines[place].__getitem__)
            both = f"{in_a_line(item)}\t{in_a_line(wanted[near])}"
            print(f"{both}\t{cosines[place][near]:.4f}\t{distances[place][near]:.4f}")
    if plot is not None:
        from qkv.inspection.word_map import plot_word_map

        kinds = ["in its sentence" if is_contextual else "token table" for is_contextual in found.is_contextual]
        figure = plot_word_map(found.vectors, wanted, groups=kinds if len(set(kinds)) > 1 else (), title=f"Words of {model}")
        save_figure(figure, plot)
