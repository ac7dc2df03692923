"""Numbers arrive as they were sent."""

import math
import struct

import numpy as np
import pytest
import torch

from qkv.choices import AttentionKind
from qkv.serving.app import zipped
from qkv.serving.frame_codec import Shares, as_json, pack, unpack


def test_a_frame_gives_back_its_tree():
    sent = {"a": torch.tensor([[1.5, float("nan")], [float("-inf"), 2.0]]), "b": [torch.arange(3), "ñ😀", None, True]}
    found = unpack(pack(sent))
    np.testing.assert_array_equal(found["a"], sent["a"].numpy())
    assert found["a"].dtype == np.float32
    np.testing.assert_array_equal(found["b"][0], [0, 1, 2])
    assert found["b"][1:] == ["ñ😀", None, True]


def test_every_blob_begins_where_a_typed_array_can_lie():
    frame = pack(
        {"odd": Shares(torch.rand(3)), "next": torch.rand(5), "ñ": Shares(torch.rand(1)), "last": torch.rand(2)}
    )
    (n,) = struct.unpack_from("<I", frame)
    assert (4 + n) % 8 == 0
    assert len(frame) % 8 == 0
    assert unpack(frame)["last"].shape == (2,)


def test_a_share_is_wrong_by_at_most_0_004():
    shares = torch.linspace(0, 1, 100_003)
    found = unpack(pack({"w": Shares(shares)}))["w"]
    assert np.abs(found - shares.numpy()).max() <= 0.004
    assert found[[0, -1]].tolist() == [0, 1]


def test_a_number_that_is_none_is_null_in_json():
    assert (
        as_json({"a": float("nan"), "b": float("inf"), "stack": AttentionKind.SELF})
        == b'{"a": null, "b": null, "stack": "self"}'
    )


def test_a_tensor_cannot_be_lost_in_json():
    with pytest.raises(AssertionError, match="need a frame"):
        as_json({"a": torch.zeros(2)})


def test_weights_of_a_row_keep_their_order():
    weights = torch.rand(50).softmax(-1)
    found = unpack(pack({"w": Shares(weights)}))["w"]
    assert np.abs(found - weights.numpy()).max() <= 0.004
    order = weights.argsort()
    assert (np.diff(found[order.numpy()]) >= 0).all()


def test_144_heads_of_128_tokens_travel_in_a_megabyte():
    """Of scores as scattered as a trained BERT's (entropy 0.6 of an even row's), which is the hardest to shorten."""
    scores = 2.5 * torch.randn(12, 12, 128, 128, generator=torch.Generator().manual_seed(7))
    assert 0.5 < torch.special.entr(scores.softmax(-1)).sum(-1).mean() / math.log(128) < 0.65
    assert sum(len(zipped(pack({"w": Shares(one.softmax(-1))}), is_text=False)) for one in scores) <= 1_000_000
