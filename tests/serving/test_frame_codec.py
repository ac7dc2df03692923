"""Frames decode to the data they were encoded from."""

import math
import struct

import numpy as np
import pytest
import torch

from qkv.choices import AttentionStack
from qkv.serving.app import gzip_compress
from qkv.serving.frame_codec import WeightsToQuantize, decode_frame, encode_frame, encode_json_nan_as_null


def test_a_decoded_frame_equals_its_tree():
    data = {"a": torch.tensor([[1.5, float("nan")], [float("-inf"), 2.0]]), "b": [torch.arange(3), "ñ😀", None, True]}
    decoded = decode_frame(encode_frame(data))
    np.testing.assert_array_equal(decoded["a"], data["a"].numpy())
    assert decoded["a"].dtype == np.float32
    np.testing.assert_array_equal(decoded["b"][0], [0, 1, 2])
    assert decoded["b"][1:] == ["ñ😀", None, True]


def test_blobs_are_aligned_for_typed_arrays():
    frame = encode_frame(
        {
            "odd": WeightsToQuantize(torch.rand(3)),
            "next": torch.rand(5),
            "ñ": WeightsToQuantize(torch.rand(1)),
            "last": torch.rand(2),
        }
    )
    (n,) = struct.unpack_from("<I", frame)
    assert (4 + n) % 8 == 0
    assert len(frame) % 8 == 0
    assert decode_frame(frame)["last"].shape == (2,)


def test_the_error_of_quantized_weights_is_at_most_0_004():
    values = torch.linspace(0, 1, 100_003)
    decoded = decode_frame(encode_frame({"w": WeightsToQuantize(values)}))["w"]
    assert np.abs(decoded - values.numpy()).max() <= 0.004
    assert decoded[[0, -1]].tolist() == [0, 1]


def test_non_finite_numbers_are_null_in_json():
    assert (
        encode_json_nan_as_null({"a": float("nan"), "b": float("inf"), "stack": AttentionStack.SELF})
        == b'{"a": null, "b": null, "stack": "self"}'
    )


def test_json_rejects_tensors():
    with pytest.raises(AssertionError, match="need a frame"):
        encode_json_nan_as_null({"a": torch.zeros(2)})


def test_quantized_weights_keep_their_order():
    weights = torch.rand(50).softmax(-1)
    decoded = decode_frame(encode_frame({"w": WeightsToQuantize(weights)}))["w"]
    assert np.abs(decoded - weights.numpy()).max() <= 0.004
    order = weights.argsort()
    assert (np.diff(decoded[order.numpy()]) >= 0).all()


def test_144_heads_of_128_tokens_compress_to_a_megabyte():
    """Uses scores as spread out as in a trained BERT (0.6 of the maximal entropy), which compress worst."""
    scores = 2.5 * torch.randn(12, 12, 128, 128, generator=torch.Generator().manual_seed(7))
    assert 0.5 < torch.special.entr(scores.softmax(-1)).sum(-1).mean() / math.log(128) < 0.65
    assert (
        sum(
            len(gzip_compress(encode_frame({"w": WeightsToQuantize(layer.softmax(-1))}), is_text=False))
            for layer in scores
        )
        <= 1_000_000
    )
