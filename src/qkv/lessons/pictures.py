"""Where does a model look while it says what is in a picture?"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qkv.inspection import ImageAttention, plot_image_attention
from qkv.lessons import caption_model
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.lessons.scenes import (
    COLOURS,
    N_ACROSS,
    PATCH,
    RELATIONS,
    SEEN,
    SHAPES,
    SIDE,
    UNSEEN,
    Scenes,
    draw_scenes,
    words_of,
)
from qkv.models import Seq2Seq

N_STEPS = 800
N_ASKED, N_DRAWN = 500, 4
PLACES = {"a": 0, "colour": 1, "shape": 2, "relation": 3, "a, again": 4, "other colour": 5, "other shape": 6}
"""Of the words in a caption."""


def lesson(seed: int) -> DrawFigure:
    held_out = draw_scenes(N_ASKED, chance=np.random.default_rng(caption_model.HELD_OUT), among=UNSEEN)
    config = caption_model.CONFIG
    print_section("A picture as a sequence")
    print_text(f"""Pictures of {SIDE}×{SIDE} pixels, drawn by this lesson: two shapes of {len(SHAPES)} kinds in {len(COLOURS)}
        colours. Cut into {N_ACROSS}×{N_ACROSS} patches of {PATCH}×{PATCH} pixels, a picture is a sequence of
        {N_ACROSS**2} vectors of {config.d_patch} numbers. Times a matrix they are as wide as the model: a word's
        embedding is the same product, of a one-hot and a table. All else is the encoder–decoder that translates.""")
    print_text(f"""“{_said(held_out, 0)}”: first the shape on the left where they stand side by side, else the upper one.
        {len(UNSEEN)} of the {len(SEEN) + len(UNSEEN)} pairs of shapes are never shown in training; they are asked for
        at the end.""")
    model = caption_model.learn(seed=seed, n_steps=N_STEPS, report=_report)
    written = caption_model.captions(model, held_out.patches)
    _score(model, held_out, written)
    _where(model, held_out)
    _forbidden(model, held_out)
    return lambda: plot_image_attention(
        *(_looks(model, held_out, i, written[i]) for i in range(N_DRAWN)),
        title="Where each word looks while the caption is written (pairs of shapes that training never showed)",
    )


def _report(entry: Mapping[str, Any]) -> None:
    if "validation_accuracy" in entry:
        right = entry["validation_accuracy"]
        print(f"qkv: step {entry['step']} of {N_STEPS}: {right:.1%} of held-out words right", file=sys.stderr)


def _said(scenes: Scenes, number: int) -> str:
    return " ".join(words_of(scenes.captions[number].tolist()))


def _score(model: Seq2Seq, unseen: Scenes, written: list[list[int]]) -> None:
    print_section(f"Captions of {N_ASKED} new pictures, written word by word: how many are right as a whole")
    seen = draw_scenes(N_ASKED, chance=np.random.default_rng(caption_model.HELD_OUT), among=SEEN)
    rows = []
    for name, scenes, said in (
        ("pairs that training showed", seen, caption_model.captions(model, seen.patches)),
        ("pairs that it never showed", unseen, written),
    ):
        n_right = sum(one == wanted for one, wanted in zip(said, scenes.captions.tolist(), strict=True))
        rows.append((name, n_right, f"{n_right / N_ASKED:.1%}"))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    print_table(["", "right", "share"], rows)
    print_text(
        f"{n_parameters:,} parameters, {N_STEPS} steps of {caption_model.BATCH} pictures, each picture drawn once."
    )


def _where(model: Seq2Seq, scenes: Scenes) -> None:
    print_section("Where the look that chooses a word goes (mean of the heads)")
    weights = caption_model.looks(model, scenes.patches, scenes.captions)
    on = torch.stack([(weights * scenes.inked[:, i, None]).sum(-1).mean(0) for i in range(2)], dim=1)
    rows = [(name, *on[place].tolist(), 1 - float(on[place].sum())) for name, place in PLACES.items()]
    chance = scenes.inked.float().mean((0, 2)).tolist()
    print_table(
        ["word", "first shape", "second shape", "ground"],
        [*rows, ("an even glance", *chance, 1 - sum(chance))],
        digits=2,
    )


def _forbidden(model: Seq2Seq, scenes: Scenes) -> None:
    print_section("Is it read there? The same, with looks at one shape forbidden: share of words right")
    rules = {"nothing": None, "the first shape": scenes.inked[:, 0], "the second shape": scenes.inked[:, 1]}
    rows = [
        (name, *caption_model.right_words(model, scenes, hidden=rule).tolist()[1:7]) for name, rule in rules.items()
    ]
    print_table(["forbidden", *list(PLACES)[1:]], rows, digits=2)
    print_text(f"""What is said of the other shape stays. What is said of this one becomes a guess, 1 of {len(COLOURS)} colours
        and 1 of {len(SHAPES)} shapes, and so does the relation, 1 of {len(RELATIONS)}, for which both are needed.""")


def _looks(model: Seq2Seq, scenes: Scenes, number: int, ids: list[int]) -> ImageAttention:
    words = words_of(ids)
    weights = caption_model.looks(model, scenes.patches[number, None], torch.tensor([ids]))[0, : len(words)]
    return ImageAttention(image=scenes.pictures[number], words=words, weights=weights, patches_per_row=N_ACROSS)
