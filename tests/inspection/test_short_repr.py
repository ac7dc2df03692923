"""The repr of views is short regardless of the text length."""

import pytest
import torch

from qkv.inspection import (
    attention_map,
    classify_heads,
    logit_lens,
    prepare_input,
    residual_stream_norms,
    run_with_cache,
)
from qkv.inspection.alignment import CrossAttention
from tests.tasks.small_gpt import small_gpt


@pytest.mark.parametrize(
    "view",
    [run_with_cache, classify_heads, attention_map, residual_stream_norms, logit_lens],
    ids=lambda view: view.__name__,
)
def test_the_repr_of_a_view_is_one_line(view):
    task = small_gpt()
    cache = run_with_cache(task.model, prepare_input(task, "the cat sat on the mat and the dog sat on the cat"))
    text = repr(cache if view is run_with_cache else view(cache, task.tokenizer) if view is logit_lens else view(cache))
    assert "\n" not in text
    assert "tensor(" not in text
    assert len(text) < 800


def test_tensors_show_their_shape_and_long_lists_their_length():
    tokens = [f"token {number}" for number in range(11)]
    attention = CrossAttention(
        weights=torch.zeros(2, 3, 11, 11),
        source=tokens,
        target=tokens,
        source_word_ids=[None] * 11,
        target_word_ids=[0] * 11,
    )
    assert repr(attention).startswith(
        "CrossAttention(weights=<2×3×11×11>, source=['token 0', … 11 in all], target=['token 0', … 11 in all]"
    )
