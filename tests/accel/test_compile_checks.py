"""Tests of the checks for compiled inference on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from qkv.accel.cuda.compile_checks import is_compiled_for_inference, should_fuse_linear_gelu_for_inference


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("other", ["float32", "cpu", "not compiled", "gradients"])
def test_only_16_bit_compiled_inference_on_a_gpu_counts_as_compiled_inference(other, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    x = torch.ones(3, dtype=torch.bfloat16).as_subclass(OnGPU)
    with torch.no_grad():
        assert is_compiled_for_inference(x)
        assert is_compiled_for_inference(x.half())
        if other == "not compiled":
            monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: False)
        x = {"float32": x.float(), "cpu": torch.ones(3, dtype=torch.bfloat16)}.get(other, x)
        with torch.set_grad_enabled(other == "gradients"):
            assert not is_compiled_for_inference(x)


HOPPER = {"major": 9, "multi_processor_count": 132}


@pytest.mark.parametrize(
    ("n_rows", "shape", "other", "pays"),
    [
        (128 * 5 + 1, (3072, 768), {}, True),
        (128 * 5, (3072, 768), {}, False),  # 120 tiles for 132 multiprocessors
        (128 * 5, (3072, 768), {"multi_processor_count": 120}, True),
        (8192, (3072, 768), {"major": 8}, False),
        (8192, (3072, 768), {"major": 12}, False),
        (8192, (3072 + 64, 768), {}, False),
        (8192, (3072, 764), {}, False),
    ],
)
def test_linear_gelu_is_fused_on_hopper_with_a_tile_per_multiprocessor(n_rows, shape, other, pays, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**HOPPER | other))
    x = torch.empty(1, n_rows, shape[1], dtype=torch.bfloat16).as_subclass(OnGPU)
    weight = torch.empty(shape, dtype=torch.bfloat16)
    with torch.no_grad():
        assert should_fuse_linear_gelu_for_inference(x, weight) is pays
        assert not should_fuse_linear_gelu_for_inference(x, weight.float())
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert not should_fuse_linear_gelu_for_inference(x, weight)
