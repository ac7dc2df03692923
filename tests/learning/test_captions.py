"""An image captioner learns to describe images and attends to the objects that it names."""

import numpy as np
import pytest

from qkv.lessons import caption_model
from qkv.lessons.scenes import UNSEEN_PAIRS, draw_scenes

COLOR, OTHER_COLOR = 1, 5


@pytest.mark.parametrize(
    ("n_steps", "color_accuracy", "exact_match", "attention_share"),
    [(200, 0.9, 0.02, 0.25), pytest.param(800, 0.99, 0.97, 0.5, marks=pytest.mark.long)],
)
def test_a_captioner_names_what_it_attends_to(n_steps, color_accuracy, exact_match, attention_share):
    model = caption_model.train_caption_model(seed=0, n_steps=n_steps)
    scenes = draw_scenes(300, rng=np.random.default_rng(caption_model.HELD_OUT_SEED), pairs=UNSEEN_PAIRS)
    accuracy = caption_model.teacher_forced_word_accuracy(model, scenes)
    assert accuracy[[COLOR, OTHER_COLOR]].min() > color_accuracy, accuracy
    captions = caption_model.generate_captions(model, scenes.patches)
    assert (
        np.mean([caption == expected for caption, expected in zip(captions, scenes.captions.tolist(), strict=True)])
        >= exact_match
    )
    weights = caption_model.mean_cross_attention_weights(model, scenes.patches, scenes.captions)
    for word, shape in ((COLOR, 0), (OTHER_COLOR, 1)):
        share = (weights[:, word] * scenes.shape_patches[:, shape]).sum(-1).mean()
        assert share > attention_share, (
            f"word {word}: {share:.2f}, uniform attention: {scenes.shape_patches.float().mean():.2f}"
        )
    # The information comes from there: without access to the patches of one shape, its color is guessed, and the
    # other color is still right.
    masked_accuracy = caption_model.teacher_forced_word_accuracy(
        model, scenes, masked_patches=scenes.shape_patches[:, 0]
    )
    assert masked_accuracy[COLOR] < 0.35
    assert abs(masked_accuracy[OTHER_COLOR] - accuracy[OTHER_COLOR]) < 0.02
