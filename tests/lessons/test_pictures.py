"""The lesson about pictures: what it draws, what it says of it, and what it tells."""

import numpy as np
import pytest
import torch

from qkv.inspection import record
from qkv.lessons import caption_model, pictures
from qkv.lessons.scenes import COLOURS, N_ACROSS, PATCH, SEEN, SHAPES, UNSEEN, WORDS, Scenes, draw_scenes, words_of
from qkv.models import Seq2Seq


@pytest.fixture(scope="module")
def scenes():
    return draw_scenes(200, chance=np.random.default_rng(3))


def test_the_caption_says_what_is_there(scenes):
    for picture, caption, inked in zip(scenes.pictures, scenes.captions, scenes.inked, strict=True):
        _, colour, shape, relation, _, other_colour, other_shape = words_of(caption.tolist())
        assert {shape, other_shape} <= set(SHAPES)
        patches = Scenes(pictures=picture[None], captions=caption[None], inked=inked[None]).patches[0]
        centres = []
        for named, ink in ((colour, inked[0]), (other_colour, inked[1])):
            apart = (patches[ink].view(-1, 1, 3) - torch.tensor(list(COLOURS.values()))).abs().amax(-1)
            assert list(COLOURS)[int((apart < 1e-3).sum(0).argmax())] == named
            centres.append(torch.nonzero(ink.view(N_ACROSS, N_ACROSS)).float().mean(0))
        down, right = (centres[1] - centres[0]).tolist()
        assert relation == ("left of" if right > abs(down) else "above")
        assert max(right, down) > 0


def test_ground_is_all_that_the_other_patches_show(scenes):
    empty = scenes.patches[~scenes.inked.any(1)]
    assert empty.std(0).max() < 1e-6
    assert (scenes.patches[scenes.inked.any(1)] - empty[0]).abs().amax(1).min() > 0
    assert not scenes.inked.all(1).any()


def test_pairs_that_are_asked_at_the_end_are_never_shown_in_training(scenes):
    def pairs(some):
        return {(*caption[1:3], *caption[5:7]) for caption in some.captions.tolist()}

    asked = draw_scenes(200, chance=np.random.default_rng(3), among=UNSEEN)
    assert not pairs(scenes) & pairs(asked)
    assert len(SEEN) + len(UNSEEN) == (len(COLOURS) * len(SHAPES)) ** 2
    assert PATCH * N_ACROSS == scenes.pictures.shape[1] == scenes.pictures.shape[2]


def test_batch_t_is_drawn_from_seed_and_t_alone():
    one, again, other = (draw_scenes(5, chance=np.random.default_rng((7, t))) for t in (2, 2, 3))
    assert torch.equal(one.pictures, again.pictures)
    assert not torch.equal(one.pictures, other.pictures)


def test_the_lesson_runs_and_draws(told, monkeypatch):
    monkeypatch.setattr(pictures, "N_STEPS", 20)
    monkeypatch.setattr(pictures, "N_ASKED", 23)
    lesson = told("pictures")
    assert lesson.row("pairs that it never showed")[-1].endswith("%")
    for word in ("colour", "shape", "relation", "an even glance"):
        assert sum(lesson.numbers(word)) == pytest.approx(1, abs=0.011)
    assert len(lesson.numbers("the first shape")) == 6


def test_a_hidden_patch_is_never_looked_at():
    model = Seq2Seq(caption_model.CONFIG).eval()
    scenes = draw_scenes(3, chance=np.random.default_rng(5))
    with record(model, "decoder.blocks.0.cross_attention.weights") as trace:
        caption_model.right_words(model, scenes, hidden=scenes.inked[:, 1])
    weights = trace["decoder.blocks.0.cross_attention.weights"].mean((1, 2))
    assert weights[scenes.inked[:, 1]].max() == 0
    assert weights[scenes.inked[:, 0]].min() > 0
    assert WORDS[int(scenes.captions[0, -1])] == "<end>"


def test_the_look_that_chose_a_word_is_of_the_word_before_it():
    model = Seq2Seq(caption_model.CONFIG).eval()
    scenes = draw_scenes(3, chance=np.random.default_rng(5))
    others = scenes.captions.clone()
    others[:, 3] = WORDS.index("a")
    apart = caption_model.looks(model, scenes.patches, scenes.captions) - caption_model.looks(model, scenes.patches, others)
    assert (apart.abs().amax((0, 2)) > 0).nonzero().tolist() == [[4]]
