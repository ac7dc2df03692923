"""Int8 quantization: error bounds and exact round trips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import WeightsError
from qkv.weights.checkpoint_folder import dequantize_int8_matrices, quantize_matrices_to_int8, read_safetensors
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_native_int8
from tests.weights.loaded_models import random_model

sizes = st.floats(-30, 30).map(lambda power: 2.0**power)


@given(size=sizes, seed=st.integers(0, 99))
def test_the_error_is_at_most_half_the_scale_of_the_row(size, seed):
    matrix = torch.randn(7, 13, generator=torch.Generator().manual_seed(seed)) * size
    quantized = quantize_matrices_to_int8({"m": matrix})
    scale = quantized["m.scale"][:, None]
    assert quantized["m"].dtype is torch.int8
    assert ((dequantize_int8_matrices(quantized)["m"] - matrix).abs() <= scale / 2 * (1 + 1e-5)).all()
    max_abs = matrix.abs().amax(1, keepdim=True)
    assert (scale >= max_abs / 127).all()
    assert (scale <= max_abs / 127 * (1 + 2**-14)).all()


@given(size=sizes, seed=st.integers(0, 99))
def test_quantizing_twice_gives_the_same_bytes(size, seed):
    matrix = torch.randn(5, 11, generator=torch.Generator().manual_seed(seed)) * size
    first = quantize_matrices_to_int8({"m": matrix})
    back = dequantize_int8_matrices(first)
    assert torch.equal(
        back["m"].double(), first["m"].double() * first["m.scale"].double()[:, None]
    )  # the product is exact
    second = quantize_matrices_to_int8(back)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_rows_of_zeros_stay_zero_and_rows_are_independent():
    matrix = torch.tensor([[0.0, 0.0], [1000.0, -500.0], [0.001, 0.0005]])
    back = dequantize_int8_matrices(quantize_matrices_to_int8({"m": matrix}))["m"]
    assert torch.equal(back[0], matrix[0])
    torch.testing.assert_close(back, matrix, rtol=1 / 126, atol=0)


def test_vectors_are_not_quantized():
    vector = torch.randn(17)
    assert torch.equal(quantize_matrices_to_int8({"norm.weight": vector})["norm.weight"], vector)


def test_non_finite_weights_are_rejected():
    with pytest.raises(WeightsError, match=r"^m: .*finite"):
        quantize_matrices_to_int8({"m": torch.tensor([[1.0, float("nan")]])})


@pytest.mark.parametrize(
    ("broken", "message"),
    [({}, r".*m\.scale"), ({"m.scale": torch.ones(2)}, r".*m\.scale .*\(2,\)")],
)
def test_a_matrix_without_scales_is_rejected(broken, message):
    with pytest.raises(WeightsError, match=r"^m: .*\b3 rows" + message):
        dequantize_int8_matrices({"m": torch.ones(3, 5, dtype=torch.int8), **broken})


@pytest.mark.parametrize("name", ["gpt2", "llama, group size 5, untied"])
def test_an_int8_folder_is_close_to_the_original_and_saved_second_exactly(name, tmp_path):
    loaded = random_model(name)
    save_native_int8(loaded, tmp_path / "once")
    once = load_model(tmp_path / "once")
    save_native_int8(once, tmp_path / "twice")
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()
    for key, parameter in loaded.model.named_parameters():
        bound = parameter.abs().max() / 127 if parameter.dim() > 1 else 0.0
        assert (once.model.get_parameter(key) - parameter).abs().max() <= bound
    assert once.model.config == loaded.model.config
    assert once.tokenizer is not None
    assert once.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    assert {t.dtype for t in read_safetensors(tmp_path / "once" / "model.safetensors").values()} == {
        torch.int8, torch.float32,
    }  # fmt: skip
