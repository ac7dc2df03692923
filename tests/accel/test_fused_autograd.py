"""The fused kernels for training equal torch in both passes, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.cuda import fused_modules
from qkv.accel.cuda.fused_autograd import (
    is_compiling_cuda_bf16_autocast_training,
    residual_and_bf16_norm_fused_backward,
)
from qkv.accel.cuda.fused_modules import find_fused_replacement
from qkv.accel.swap import ModuleSwap
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.nn import InputEmbedding
from qkv.nn.norm import LayerNorm, RMSNorm


@pytest.fixture
def kernels(kernel_device, monkeypatch):
    """The kernel module with tiles so small that every kernel needs several programs."""
    from qkv.accel.cuda import fused_autograd_kernels

    sizes = {"ROWS": 4, "COLUMNS": 32, "COPIED_ROWS_PER_PROGRAM": 12}
    sizes |= {"BACKWARD_ROWS": 2, "BACKWARD_COLUMNS": 16, "ROWS_PER_PROGRAM": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(fused_autograd_kernels, name, value)
    return fused_autograd_kernels


@pytest.mark.parametrize("width", [31, 64, 101])
def test_gelu_adds_its_bias_and_gives_both_gradients(kernels, kernel_device, width):
    generator = torch.Generator().manual_seed(3)
    x, grad_output = (3 * torch.randn(3, 7, width, generator=generator) for _ in range(2))
    x[0, 0, :5] = torch.tensor([-30.0, -7.0, 0.0, 7.0, 30.0])
    bias = torch.randn(width, generator=generator)
    x, bias, grad_output = (tensor.to(kernel_device) for tensor in (x, bias, grad_output))
    reference_inputs, fused_inputs = ([x.clone().requires_grad_(), bias.clone().requires_grad_()] for _ in range(2))
    expected = F.gelu(reference_inputs[0] + reference_inputs[1])
    actual = kernels.biased_gelu_forward(*fused_inputs)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)
    expected.backward(grad_output)
    actual.backward(grad_output)
    for fused, reference in zip(fused_inputs, reference_inputs, strict=True):
        torch.testing.assert_close(fused.grad, reference.grad, atol=2e-5, rtol=2e-6)


def test_three_matrices_are_concatenated_and_their_columns_summed(kernels, kernel_device):
    wide = torch.randn(21, 120, device=kernel_device)
    parts = [wide[:, :37], wide[:, 40:93], torch.randn(11, 21, device=kernel_device).T]
    joined, sums = kernels.concat_with_partial_column_sums(*parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    torch.testing.assert_close(sums.sum(0), joined.sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("width", [31, 64])
@pytest.mark.parametrize("norm_class", [LayerNorm, RMSNorm])
def test_a_norms_gradients_are_added_to_those_of_the_stream(
    kernel_device, monkeypatch, norm_class, width, is_transposed
):
    from qkv.accel.cuda import norm_backward_kernel

    monkeypatch.setattr(norm_backward_kernel, "ROWS_PER_PROGRAM", 8)
    generator = torch.Generator().manual_seed(5)
    norm = norm_class(width)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    norm.to(kernel_device)
    x, residual_grad, norm_grad = (
        torch.randn(3, 7, width, generator=generator).bfloat16().to(kernel_device) for _ in range(3)
    )
    if is_transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)

    def gradients(residual_and_norm):
        start = x.clone().requires_grad_()
        norm.zero_grad()
        torch.autograd.backward(residual_and_norm(start), (residual_grad, norm_grad))
        return [start.grad, *(parameter.grad.clone() for parameter in norm.parameters())]

    expected = gradients(lambda start: (start.view_as(start), norm(start.float()).bfloat16()))
    actual = gradients(lambda start: residual_and_bf16_norm_fused_backward(start, norm))
    for fused, reference in zip(actual, expected, strict=True):
        atol = 0.02 if fused.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(fused.float(), reference.float(), atol=atol, rtol=1e-2)


@pytest.fixture
def compile_backend(kernels, kernel_device, monkeypatch):
    """The backend of torch.compile. On a CPU, the fused modules run as if the model were compiled for a GPU."""
    monkeypatch.setattr(fused_modules, "MIN_TOKENS_FOR_FUSED_QKV", 1)
    if kernel_device.type == "cuda":
        return "inductor"
    for check in ("is_compiling_cuda_bf16_autocast_training", "should_fuse_qkv"):
        monkeypatch.setattr(fused_modules, check, lambda _: True)
    monkeypatch.setattr(
        fused_modules.AutocastInputEmbedding,
        "forward",
        lambda embedding, *inputs: InputEmbedding.forward(embedding, *inputs).bfloat16(),
    )
    return "aot_eager_decomp_partition"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # raised by the eager model, whose residual stream is float32
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradients_of_a_model_equal_those_of_the_eager_implementation(kernel_device, compile_backend, kind):
    size = {"vocab_size": 37, "context_length": 13, "n_layers": 2, "d_model": 24, "n_heads": 3}
    llama = {"norm": NormKind.RMS, "gated": True, "activation": Activation.SILU, "positions": PositionKind.ROTARY}
    architecture = {"activation": Activation.GELU} if kind == "gpt2" else llama
    model = GPT(GPTConfig(**size, **architecture), seed=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    model.to(kernel_device)
    ids = torch.randint(37, (2, 13), generator=torch.Generator().manual_seed(2)).to(kernel_device)

    def gradients(run):
        model.zero_grad()
        with torch.autocast(kernel_device.type, dtype=torch.bfloat16):
            run(ids).float().logsumexp(-1).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients(model)
    with ModuleSwap(model, find_fused_replacement):
        actual = gradients(torch.compile(model, backend=compile_backend, dynamic=False, fullgraph=True))
    for name, gradient in expected.items():
        # The bias of the keys shifts all scores of a query equally, so its gradient is zero up to rounding.
        if not name.endswith("k_proj.bias"):
            assert (actual[name] - gradient).norm() < 0.05 * gradient.norm(), name


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
