"""Who goes the short roads of a compiled graph: 16-bit numbers on a GPU, and nobody who wants gradients."""

import pytest
import torch

from qkv.nn.compiled import reads_compiled


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("other", ["float32", "cpu", "not compiled", "gradients"])
def test_a_compiled_graph_without_gradients_in_16_bits_on_a_gpu_alone(other, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.ones(3, dtype=torch.bfloat16).as_subclass(OnGPU)
    with torch.no_grad():
        assert reads_compiled(x)
        assert reads_compiled(x.half())
        if other == "not compiled":
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
        x = {"float32": x.float(), "cpu": torch.ones(3, dtype=torch.bfloat16)}.get(other, x)
        with torch.set_grad_enabled(other == "gradients"):
            assert not reads_compiled(x)
