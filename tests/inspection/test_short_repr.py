"""What a notebook prints of a value stays short, whatever the text's length."""

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
from tests.tasks.small_gpt import small_task


@pytest.mark.parametrize(
    "view",
    [run_with_cache, classify_heads, attention_map, residual_stream_norms, logit_lens],
    ids=lambda view: view.__name__,
)
def test_a_view_is_shown_in_a_line(view):
    task = small_task()
    seen = run_with_cache(task.model, prepare_input(task, "the cat sat on the mat and the dog sat on the cat"))
    shown = repr(seen if view is run_with_cache else view(seen, task.tokenizer) if view is logit_lens else view(seen))
    assert "\n" not in shown
    assert "tensor(" not in shown
    assert len(shown) < 800


def test_of_a_tensor_the_shape_and_of_a_long_list_the_length_is_shown():
    tokens = [f"token {number}" for number in range(11)]
    one = CrossAttention(
        weights=torch.zeros(2, 3, 11, 11),
        source=tokens,
        target=tokens,
        source_word_ids=[None] * 11,
        target_word_ids=[0] * 11,
    )
    assert repr(one).startswith(
        "CrossAttention(weights=<2×3×11×11>, source=['token 0', … 11 in all], target=['token 0', … 11 in all]"
    )
