"""A captioner must learn to see, and to look where the thing is that it names."""

import numpy as np
import pytest

from qkv.lessons import caption_model
from qkv.lessons.scenes import UNSEEN, draw_scenes

COLOUR, OTHER_COLOUR = 1, 5


@pytest.mark.parametrize(
    ("n_steps", "colours_right", "exact", "looked"),
    [(200, 0.9, 0.02, 0.25), pytest.param(800, 0.99, 0.97, 0.5, marks=pytest.mark.long)],
)
def test_a_captioner_names_what_it_attends_to(n_steps, colours_right, exact, looked):
    model = caption_model.learn(seed=0, n_steps=n_steps)
    scenes = draw_scenes(300, chance=np.random.default_rng(caption_model.HELD_OUT), among=UNSEEN)
    right = caption_model.right_words(model, scenes)
    assert right[[COLOUR, OTHER_COLOUR]].min() > colours_right, right
    written = caption_model.captions(model, scenes.patches)
    assert np.mean([one == wanted for one, wanted in zip(written, scenes.captions.tolist(), strict=True)]) >= exact
    weights = caption_model.looks(model, scenes.patches, scenes.captions)
    for word, shape in ((COLOUR, 0), (OTHER_COLOUR, 1)):
        share = (weights[:, word] * scenes.inked[:, shape]).sum(-1).mean()
        assert share > looked, f"word {word}: {share:.2f}, where an even glance gives {scenes.inked.float().mean():.2f}"
    # And it is read there: what no look may reach is only guessed, the other shape is told as before.
    blind = caption_model.right_words(model, scenes, hidden=scenes.inked[:, 0])
    assert blind[COLOUR] < 0.35
    assert abs(blind[OTHER_COLOUR] - right[OTHER_COLOUR]) < 0.02
