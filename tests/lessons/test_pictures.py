"""The lesson on pictures: random images, captions and attention."""

import numpy as np
import pytest
import torch

from qkv.inspection import record
from qkv.lessons import caption_model, pictures
from qkv.lessons.scenes import (
    CAPTION_WORDS,
    COLORS,
    PATCH,
    PATCHES_PER_ROW,
    SEEN_PAIRS,
    SHAPES,
    UNSEEN_PAIRS,
    Scenes,
    draw_scenes,
    ids_to_words,
)
from qkv.models import Seq2Seq


@pytest.fixture(scope="module")
def scenes():
    return draw_scenes(200, rng=np.random.default_rng(3))


def test_the_caption_describes_the_image(scenes):
    for image, caption, shape_patches in zip(scenes.images, scenes.captions, scenes.shape_patches, strict=True):
        _, color, shape, relation, _, other_color, other_shape = ids_to_words(caption.tolist())
        assert {shape, other_shape} <= set(SHAPES)
        patches = Scenes(images=image[None], captions=caption[None], shape_patches=shape_patches[None]).patches[0]
        centers = []
        for name, patch_mask in ((color, shape_patches[0]), (other_color, shape_patches[1])):
            distances = (patches[patch_mask].view(-1, 1, 3) - torch.tensor(list(COLORS.values()))).abs().amax(-1)
            assert list(COLORS)[int((distances < 1e-3).sum(0).argmax())] == name
            centers.append(torch.nonzero(patch_mask.view(PATCHES_PER_ROW, PATCHES_PER_ROW)).float().mean(0))
        down, right = (centers[1] - centers[0]).tolist()
        assert relation == ("left of" if right > abs(down) else "above")
        assert max(right, down) > 0


def test_all_other_patches_show_only_the_background(scenes):
    empty = scenes.patches[~scenes.shape_patches.any(1)]
    assert empty.std(0).max() < 1e-6
    assert (scenes.patches[scenes.shape_patches.any(1)] - empty[0]).abs().amax(1).min() > 0
    assert not scenes.shape_patches.all(1).any()


def test_held_out_pairs_never_occur_in_training(scenes):
    def pairs(some):
        return {(*caption[1:3], *caption[5:7]) for caption in some.captions.tolist()}

    held_out = draw_scenes(200, rng=np.random.default_rng(3), pairs=UNSEEN_PAIRS)
    assert not pairs(scenes) & pairs(held_out)
    assert len(SEEN_PAIRS) + len(UNSEEN_PAIRS) == (len(COLORS) * len(SHAPES)) ** 2
    assert PATCH * PATCHES_PER_ROW == scenes.images.shape[1] == scenes.images.shape[2]


def test_a_batch_depends_only_on_the_seed_and_the_step():
    first, repeated, different = (draw_scenes(5, rng=np.random.default_rng((7, t))) for t in (2, 2, 3))
    assert torch.equal(first.images, repeated.images)
    assert not torch.equal(first.images, different.images)


def test_the_lesson_runs_and_draws(run_lesson, monkeypatch):
    monkeypatch.setattr(pictures, "N_CAPTION_STEPS", 20)
    monkeypatch.setattr(pictures, "N_TEST_SCENES", 23)
    lesson = run_lesson("pictures")
    assert lesson.row("pairs that do not occur in training")[-1].endswith("%")
    for word in ("color", "shape", "relation", "uniform attention"):
        assert sum(lesson.numbers(word)) == pytest.approx(1, abs=0.011)
    assert len(lesson.numbers("the first shape")) == 6


def test_a_masked_patch_has_no_attention_weight():
    model = Seq2Seq(caption_model.CAPTION_CONFIG).eval()
    scenes = draw_scenes(3, rng=np.random.default_rng(5))
    with record(model, "decoder.blocks.0.cross_attention.weights") as cache:
        caption_model.teacher_forced_word_accuracy(model, scenes, masked_patches=scenes.shape_patches[:, 1])
    weights = cache["decoder.blocks.0.cross_attention.weights"].mean((1, 2))
    assert weights[scenes.shape_patches[:, 1]].max() == 0
    assert weights[scenes.shape_patches[:, 0]].min() > 0
    assert CAPTION_WORDS[int(scenes.captions[0, -1])] == "<end>"


def test_the_weights_of_a_word_are_those_of_the_preceding_query():
    model = Seq2Seq(caption_model.CAPTION_CONFIG).eval()
    scenes = draw_scenes(3, rng=np.random.default_rng(5))
    others = scenes.captions.clone()
    others[:, 3] = CAPTION_WORDS.index("a")
    before = caption_model.mean_cross_attention_weights(model, scenes.patches, scenes.captions)
    after = caption_model.mean_cross_attention_weights(model, scenes.patches, others)
    assert ((after - before).abs().amax((0, 2)) > 0).nonzero().tolist() == [[4]]
