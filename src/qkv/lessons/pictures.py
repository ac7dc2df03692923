"""Lesson: the image patches that a captioning model attends to while it generates a caption."""

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
    COLORS,
    PATCH,
    PATCHES_PER_ROW,
    RELATIONS,
    SEEN_PAIRS,
    SHAPES,
    SIDE,
    UNSEEN_PAIRS,
    Scenes,
    draw_scenes,
    ids_to_words,
)
from qkv.models import Seq2Seq

N_CAPTION_STEPS = 800
N_TEST_SCENES, N_PLOTTED_SCENES = 500, 4
CAPTION_SLOTS = {"a": 0, "color": 1, "shape": 2, "relation": 3, "second a": 4, "other color": 5, "other shape": 6}
"""Indices of the words in a caption."""


def lesson(seed: int) -> DrawFigure:
    held_out = draw_scenes(N_TEST_SCENES, rng=np.random.default_rng(caption_model.HELD_OUT_SEED), pairs=UNSEEN_PAIRS)
    config = caption_model.CAPTION_CONFIG
    print_section("An image as a sequence")
    print_text(f"""This lesson draws images of {SIDE}×{SIDE} pixels. Each image contains two shapes, and there are
        {len(SHAPES)} kinds of shapes and {len(COLORS)} colors. Splitting an image into
        {PATCHES_PER_ROW}×{PATCHES_PER_ROW} patches of {PATCH}×{PATCH} pixels gives a sequence of {PATCHES_PER_ROW**2}
        vectors with {config.d_patch} numbers each. A linear projection maps these vectors to the width of the model,
        just as an embedding maps one-hot vectors. The rest of the model is the same encoder–decoder as for
        translation.""")
    print_text(f"""An example of a caption is “{_caption_text(held_out, 0)}”. If the shapes are side by side, the
        caption names the left one first. Otherwise, it names the upper one first. {len(UNSEEN_PAIRS)} of the
        {len(SEEN_PAIRS) + len(UNSEEN_PAIRS)} pairs of colored shapes do not occur in training and are used for
        testing.""")
    model = caption_model.train_caption_model(
        seed=seed, n_steps=N_CAPTION_STEPS, report=_print_validation_accuracy_if_present
    )
    generated = caption_model.generate_captions(model, held_out.patches)
    _print_exact_caption_accuracy(model, held_out, generated)
    _print_attention_on_shapes_by_word(model, held_out)
    _print_accuracy_with_masked_shapes(model, held_out)
    return lambda: plot_image_attention(
        *(_image_attention(model, held_out, i, generated[i]) for i in range(N_PLOTTED_SCENES)),
        title="Attention to image patches for each word of the caption (pairs that do not occur in training)",
    )


def _print_validation_accuracy_if_present(entry: Mapping[str, Any]) -> None:
    if "validation_accuracy" in entry:
        accuracy = entry["validation_accuracy"]
        print(
            f"qkv: step {entry['step']} of {N_CAPTION_STEPS}: {accuracy:.1%} of held-out words correct", file=sys.stderr
        )


def _caption_text(scenes: Scenes, index: int) -> str:
    return " ".join(ids_to_words(scenes.captions[index].tolist()))


def _print_exact_caption_accuracy(model: Seq2Seq, unseen: Scenes, unseen_captions: list[list[int]]) -> None:
    print_section(f"Number of completely correct captions for {N_TEST_SCENES} new images")
    familiar = draw_scenes(N_TEST_SCENES, rng=np.random.default_rng(caption_model.HELD_OUT_SEED), pairs=SEEN_PAIRS)
    rows = []
    for name, scenes, captions in (
        ("pairs that occur in training", familiar, caption_model.generate_captions(model, familiar.patches)),
        ("pairs that do not occur in training", unseen, unseen_captions),
    ):
        n_correct = sum(a == b for a, b in zip(captions, scenes.captions.tolist(), strict=True))
        rows.append((name, n_correct, f"{n_correct / N_TEST_SCENES:.1%}"))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    print_table(["", "correct", "accuracy"], rows)
    print_text(f"""The model has {n_parameters:,} parameters and was trained for {N_CAPTION_STEPS} steps with
        {caption_model.BATCH_SIZE} new images per step.""")


def _print_attention_on_shapes_by_word(model: Seq2Seq, scenes: Scenes) -> None:
    print_section("Attention weights used to predict each word (mean over heads)")
    weights = caption_model.mean_cross_attention_weights(model, scenes.patches, scenes.captions)
    weight_on_shape = torch.stack(
        [(weights * scenes.shape_patches[:, i, None]).sum(-1).mean(0) for i in range(2)], dim=1
    )
    rows = [
        (name, *weight_on_shape[slot].tolist(), 1 - float(weight_on_shape[slot].sum()))
        for name, slot in CAPTION_SLOTS.items()
    ]
    uniform = scenes.shape_patches.float().mean((0, 2)).tolist()
    print_table(
        ["word", "first shape", "second shape", "background"],
        [*rows, ("uniform attention", *uniform, 1 - sum(uniform))],
        digits=2,
    )


def _print_accuracy_with_masked_shapes(model: Seq2Seq, scenes: Scenes) -> None:
    print_section("Accuracy of each word if attention to one shape is masked")
    masked_patches = {
        "nothing": None,
        "the first shape": scenes.shape_patches[:, 0],
        "the second shape": scenes.shape_patches[:, 1],
    }
    rows = [
        (name, *caption_model.teacher_forced_word_accuracy(model, scenes, masked_patches=patches).tolist()[1:7])
        for name, patches in masked_patches.items()
    ]
    print_table(["masked", *list(CAPTION_SLOTS)[1:]], rows, digits=2)
    print_text(f"""The words that describe the other shape stay correct. For the masked shape, the model guesses one of
        {len(COLORS)} colors and one of {len(SHAPES)} shapes. It also guesses one of {len(RELATIONS)} relations because
        the relation depends on both shapes.""")


def _image_attention(model: Seq2Seq, scenes: Scenes, index: int, ids: list[int]) -> ImageAttention:
    words = ids_to_words(ids)
    weights = caption_model.mean_cross_attention_weights(model, scenes.patches[index, None], torch.tensor([ids]))[
        0, : len(words)
    ]
    return ImageAttention(image=scenes.images[index], words=words, weights=weights, patches_per_row=PATCHES_PER_ROW)
