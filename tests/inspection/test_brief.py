"""What a notebook prints of a value stays short, whatever the text's length."""

import pytest
import torch

from qkv.inspection import attention_map, heads, lens, read, see, stream
from qkv.inspection.alignment import CrossAttention
from tests.tasks.small import small_task


@pytest.mark.parametrize("view", [see, heads, attention_map, stream, lens], ids=lambda view: view.__name__)
def test_a_view_is_shown_in_a_line(view):
    task = small_task()
    seen = see(task.model, read(task, "the cat sat on the mat and the dog sat on the cat"))
    shown = repr(seen if view is see else view(seen, task.tokenizer) if view is lens else view(seen))
    assert "\n" not in shown
    assert "tensor(" not in shown
    assert len(shown) < 800


def test_of_a_tensor_the_shape_and_of_a_long_list_the_length_is_shown():
    tokens = [f"token {number}" for number in range(11)]
    one = CrossAttention(
        weights=torch.zeros(2, 3, 11, 11), source=tokens, target=tokens, source_words=[None] * 11, target_words=[0] * 11
    )
    assert repr(one).startswith(
        "CrossAttention(weights=<2×3×11×11>, source=['token 0', … 11 in all], target=['token 0', … 11 in all]"
    )
