"""A byte a weight: how far off, and the same bytes again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import WeightsError
from qkv.weights.atomic_folder import read_tensors
from qkv.weights.int8_storage import dequantize_tensors, quantize_tensors
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_int8
from tests.weights.loaded_models import random_model

sizes = st.floats(-30, 30).map(lambda power: 2.0**power)


@given(size=sizes, seed=st.integers(0, 99))
def test_the_error_is_at_most_half_the_rows_scale(size, seed):
    matrix = torch.randn(7, 13, generator=torch.Generator().manual_seed(seed)) * size
    stored = quantize_tensors({"m": matrix})
    scale = stored["m.scale"][:, None]
    assert stored["m"].dtype is torch.int8
    assert ((dequantize_tensors(stored)["m"] - matrix).abs() <= scale / 2 * (1 + 1e-5)).all()
    largest = matrix.abs().amax(1, keepdim=True)
    assert (scale >= largest / 127).all()
    assert (scale <= largest / 127 * (1 + 2**-14)).all()


@given(size=sizes, seed=st.integers(0, 99))
def test_what_was_stored_once_is_stored_again_byte_for_byte(size, seed):
    matrix = torch.randn(5, 11, generator=torch.Generator().manual_seed(seed)) * size
    once = quantize_tensors({"m": matrix})
    back = dequantize_tensors(once)
    assert torch.equal(back["m"].double(), once["m"].double() * once["m.scale"].double()[:, None])  # nothing rounded
    again = quantize_tensors(back)
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


def test_a_row_of_zeros_stays_zeros_and_rows_do_not_touch_each_other():
    matrix = torch.tensor([[0.0, 0.0], [1000.0, -500.0], [0.001, 0.0005]])
    back = dequantize_tensors(quantize_tensors({"m": matrix}))["m"]
    assert torch.equal(back[0], matrix[0])
    torch.testing.assert_close(back, matrix, rtol=1 / 126, atol=0)


def test_vectors_stay_as_they_are():
    vector = torch.randn(17)
    assert torch.equal(quantize_tensors({"norm.weight": vector})["norm.weight"], vector)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(WeightsError, match="m: has a weight that is no finite number"):
        quantize_tensors({"m": torch.tensor([[1.0, float("nan")]])})


@pytest.mark.parametrize(
    ("broken", "message"),
    [({}, "but m.scale is missing"), ({"m.scale": torch.ones(2)}, r"but m.scale has shape \(2,\)")],
)
def test_a_matrix_without_its_scales_is_refused(broken, message):
    with pytest.raises(WeightsError, match=r"m: is int8 with 3 rows, " + message):
        dequantize_tensors({"m": torch.ones(3, 5, dtype=torch.int8), **broken})


@pytest.mark.parametrize("name", ["gpt2", "llama, 5 queries a key, untied"])
def test_a_folder_in_int8_loads_near_and_is_written_again_byte_for_byte(name, tmp_path):
    loaded = random_model(name)
    save_int8(loaded, tmp_path / "once")
    once = load_model(tmp_path / "once")
    save_int8(once, tmp_path / "twice")
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()
    for key, parameter in loaded.model.named_parameters():
        bound = parameter.abs().max() / 127 if parameter.dim() > 1 else 0.0
        assert (once.model.get_parameter(key) - parameter).abs().max() <= bound
    assert once.model.config == loaded.model.config
    assert once.tokenizer is not None
    assert once.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    assert {t.dtype for t in read_tensors(tmp_path / "once" / "model.safetensors").values()} == {
        torch.int8, torch.float32,
    }  # fmt: skip
