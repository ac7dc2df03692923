"""Tests of position ids and masks."""

import torch

from qkv.models.stack import build_mask, position_ids_reserving_cache


def positions_of(**rows):
    inputs = {name: torch.tensor([row]) for name, row in rows.items()}
    first = next(iter(inputs.values()))
    return position_ids_reserving_cache(torch.zeros(first.shape, dtype=torch.long), **inputs)[0].tolist()


def test_positions_are_indices_without_padding():
    assert positions_of(attention_mask=[True, True, True]) == [0, 1, 2]
    assert position_ids_reserving_cache(torch.zeros(1, 3, dtype=torch.long)).tolist() == [[0, 1, 2]]


def test_padding_does_not_count_as_a_position():
    T, F = True, False
    assert [p for p, t in zip(positions_of(attention_mask=[F, F, T, T]), [F, F, T, T], strict=True) if t] == [0, 1]
    assert [p for p, t in zip(positions_of(attention_mask=[T, F, F, T]), [T, F, F, T], strict=True) if t] == [0, 1]


def test_padding_positions_are_inside_the_position_table():
    assert max(positions_of(attention_mask=[True, True, True, False])) < 4


def test_each_document_starts_at_zero():
    assert positions_of(documents=[5, 5, 5, 2, 2, 7]) == [0, 1, 2, 0, 1, 0]


def test_padding_does_not_count_as_a_position_in_a_document():
    positions = positions_of(documents=[0, 0, 0, 1, 1, 1], attention_mask=[False, True, True, True, False, True])
    assert [positions[i] for i in (1, 2, 3, 5)] == [0, 1, 0, 1]


def test_a_mask_without_rules_is_none():
    positions = torch.arange(3)[None]
    assert build_mask(positions, causal=False, sliding_window=None, attention_mask=None) is None
    assert build_mask(positions, causal=True, sliding_window=None, attention_mask=None).is_causal_only


def test_a_sliding_window_does_not_count_padding():
    attention_mask = torch.tensor([[True, False, False, True]])
    positions = position_ids_reserving_cache(torch.zeros(1, 4, dtype=torch.long), attention_mask=attention_mask)
    mask = build_mask(positions, causal=True, sliding_window=2, attention_mask=attention_mask)
    visible = mask.to_dense(4, 4, torch.device("cpu"))
    assert visible[0, 0, 3].tolist() == [True, False, False, True]
