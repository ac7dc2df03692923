"""Tests of the fused backward kernels in Triton's interpreter, compared with torch."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.cuda.fused_autograd import (
    is_compiling_cuda_bf16_autocast_training,
    residual_and_bf16_norm_fused_backward,
)
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.nn import LayerNorm, RMSNorm, attention, block, embedding, feed_forward
from tests.triton_marks import TRITON_INTERPRETER_MARKS

pytestmark = TRITON_INTERPRETER_MARKS


@pytest.fixture
def kernels(monkeypatch):
    from qkv.nn import fused_autograd_kernels

    sizes = {"ROWS": 4, "COLUMNS": 32, "COPIED_ROWS_PER_PROGRAM": 12}
    sizes |= {"BACKWARD_ROWS": 2, "BACKWARD_COLUMNS": 16, "ROWS_PER_PROGRAM": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(fused_autograd_kernels, name, value)
    return fused_autograd_kernels


@pytest.mark.parametrize("width", [31, 64, 101])
def test_gelu_adds_its_bias_and_gives_both_gradients(kernels, width):
    generator = torch.Generator().manual_seed(3)
    x, grad_output = (3 * torch.randn(3, 7, width, generator=generator) for _ in range(2))
    x[0, 0, :5] = torch.tensor([-30.0, -7.0, 0.0, 7.0, 30.0])
    bias = torch.randn(width, generator=generator)
    plain = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    ours = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    wanted, found = F.gelu(plain[0] + plain[1]), kernels.biased_gelu_forward(*ours)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)
    wanted.backward(grad_output)
    found.backward(grad_output)
    for actual, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=2e-5, rtol=2e-6)


def test_three_matrices_are_concatenated_and_their_columns_summed(kernels):
    wide = torch.randn(21, 120)
    parts = [wide[:, :37], wide[:, 40:93], torch.randn(11, 21).T]
    joined, sums = kernels.concat_with_partial_column_sums(*parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    torch.testing.assert_close(sums.sum(0), joined.sum(0))


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("width", [31, 64])
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_norms_gradients_are_added_to_those_of_the_stream(monkeypatch, norm, width, is_turned):
    from qkv.nn import norm_backward_kernel

    monkeypatch.setattr(norm_backward_kernel, "ROWS_PER_PROGRAM", 8)
    generator = torch.Generator().manual_seed(5)
    part = norm(width)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x, residual_grad, norm_grad = (torch.randn(3, 7, width, generator=generator).bfloat16() for _ in range(3))
    if is_turned:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)

    def gradients(two):
        start = x.clone().requires_grad_()
        part.zero_grad()
        torch.autograd.backward(two(start), (residual_grad, norm_grad))
        return [start.grad, *(parameter.grad.clone() for parameter in part.parameters())]

    wanted = gradients(lambda start: (start.view_as(start), part(start.float()).bfloat16()))
    for found, expected in zip(
        gradients(lambda start: residual_and_bf16_norm_fused_backward(start, part)), wanted, strict=True
    ):
        torch.testing.assert_close(
            found.float(), expected.float(), atol=0.02 if found.dtype is torch.bfloat16 else 1e-4, rtol=1e-2
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype"
)  # raised by the eager implementation, whose residual stream is float32 on a CPU
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradients_of_a_model_equal_those_of_the_eager_implementation(kernels, monkeypatch, compiled, kind):
    size = {"vocab_size": 37, "context_length": 13, "n_layers": 2, "d_model": 24, "n_heads": 3}
    llama = {"norm": NormKind.RMS, "gated": True, "activation": Activation.SILU, "positions": PositionKind.ROTARY}
    architecture = {"activation": Activation.GELU} if kind == "gpt2" else llama
    model = GPT(GPTConfig(**size, **architecture), seed=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    ids = torch.randint(37, (2, 13), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(embedding, "_cast_to_autocast_if_compiled", lambda x: x.bfloat16())

    def gradients(run):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(ids).float().logsumexp(-1).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    wanted = gradients(model)
    for module in (attention, feed_forward, block):
        monkeypatch.setattr(module, "is_compiling_cuda_bf16_autocast_training", lambda _x: True)
    monkeypatch.setattr(attention.Attention, "_should_fuse_qkv", lambda _self, _x: True)
    compiled_model = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False, fullgraph=True)
    found = gradients(compiled_model if compiled else model)
    for name, gradient in wanted.items():
        if not name.endswith(
            "k_proj.bias"
        ):  # it shifts all scores of a query equally, so its gradient is zero up to rounding
            assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), name


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("other", ["cpu", "not compiled", "no gradients", "no autocast", "float16"])
def test_only_compiled_bfloat16_training_on_a_gpu_counts_as_compiled_training(other, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    x = torch.zeros(3)
    assert is_compiling_cuda_bf16_autocast_training(x.as_subclass(OnGPU))
    match other:
        case "not compiled":
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
        case "no autocast":
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
        case "float16":
            monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float16)
    with torch.set_grad_enabled(other != "no gradients"):
        assert not is_compiling_cuda_bf16_autocast_training(x if other == "cpu" else x.as_subclass(OnGPU))
