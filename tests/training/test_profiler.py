"""Tests for profiling by category."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent, Interval

import qkv
from qkv.choices import ProfileCategory
from qkv.config import GPTConfig
from qkv.cost import Mode, Precision, estimate
from qkv.training import profiler
from qkv.training.profiler import (
    DeviceRates,
    _category_of_operation_name,
    durations_without_earlier_overlap,
    measure_device_rates,
    profile_training,
    time_then_profile_generation,
)
from qkv.training.timer import Timer
from tests.training.runs import build_cpu_trainer, prepare_small_run

CPU = torch.device("cpu")


class RecordedProfile:
    """Replacement for the profiler of torch, with events of known durations.

    A matmul takes 1 s. Attention takes 2 s, including 0.5 s in a matmul that it calls, whose gradient takes 0.75 s.
    """

    def __init__(self, **_options) -> None:
        product = FunctionEvent(1, "aten::mm", 0, start_us=0, end_us=1e6)
        attention = FunctionEvent(2, "aten::scaled_dot_product_attention", 0, start_us=1e6, end_us=3e6)
        inner = FunctionEvent(3, "aten::bmm", 0, start_us=1.5e6, end_us=2e6, sequence_nr=7)
        attention.append_cpu_child(inner)
        inner.set_cpu_parent(attention)
        gradient = FunctionEvent(4, "BmmBackward0", 0, start_us=3e6, end_us=3.75e6, sequence_nr=7)
        self._events = [product, attention, inner, gradient]

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def events(self):
        return self._events


def test_categories_add_up_to_the_time_without_the_profiler(monkeypatch):
    readings = iter([0.0, 2.0, 10.0, 15.0])  # 2 s without the profiler, 5 s with it
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setattr(torch.profiler, "profile", RecordedProfile)
    _, profile = time_then_profile_generation(lambda: None, CPU, expected=None)
    seconds = {category: value for category, value in profile.seconds_by_category.items() if value > 0}
    assert profile.seconds == 2.0
    assert seconds == pytest.approx(
        {ProfileCategory.PRODUCTS: 0.4, ProfileCategory.ATTENTION: 0.4 * 2.75, ProfileCategory.BETWEEN: 2 - 0.4 * 3.75}
    )
    assert sum(seconds.values()) == pytest.approx(2.0)


def test_each_operation_has_its_category():
    x = torch.randn(64, 3, 32, 16)
    weight = torch.randn(70, 70)

    def work():
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.nn.functional.rms_norm(x, (16,))
        return weight @ weight

    work()
    result, profile = time_then_profile_generation(work, CPU, expected=None)
    assert torch.equal(result, weight @ weight)
    assert {ProfileCategory.PRODUCTS, ProfileCategory.ATTENTION, ProfileCategory.NORM} <= {
        kind for kind, s in profile.seconds_by_category.items() if s > 0
    }
    assert profile.bound is None


def test_a_backward_operation_has_the_category_of_its_forward_operation():
    """Attention with dropout consists of ordinary matmuls and masks, forward and backward."""
    x = torch.randn(8, 4, 64, 16, requires_grad=True)

    def work():
        torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward()

    work()
    _, profile = time_then_profile_generation(work, CPU, expected=None)
    assert profile.seconds_by_category[ProfileCategory.ATTENTION] > 0
    assert profile.seconds_by_category.get(ProfileCategory.PRODUCTS, 0.0) == 0


def test_profiling_a_training_step_covers_all_categories_and_writes_a_trace(tmp_path):
    trainer = build_cpu_trainer(prepare_small_run(tmp_path / "run", steps=3, save_every=3, eval_every=3))
    step = estimate(GPTConfig(vocab_size=97, context_length=16, d_model=12, n_heads=3, n_layers=2), mode="train")
    profile = profile_training(trainer, step, trace=tmp_path / "trace.json")
    for kind in (
        ProfileCategory.DATA,
        ProfileCategory.LOSS,
        ProfileCategory.OPTIMIZER,
        ProfileCategory.PRODUCTS,
        ProfileCategory.EMBEDDING,
    ):
        assert profile.seconds_by_category[kind] > 0
    assert profile.bounds.keys() >= {
        ProfileCategory.OPTIMIZER,
        ProfileCategory.ATTENTION,
        ProfileCategory.PRODUCTS,
        ProfileCategory.NORM,
    }
    assert profile.bound == pytest.approx(sum(profile.bounds.values()))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_bound_of_matmuls_is_their_flops_at_the_measured_rate(monkeypatch):
    # The bandwidth is so high that every matmul is limited by its FLOPs.
    monkeypatch.setattr(
        profiler, "measure_device_rates", lambda _device, _dtype: DeviceRates(matmul_flops=1e11, bandwidth=1e15)
    )
    config = GPTConfig(vocab_size=8192, context_length=512, d_model=512, n_heads=8, n_layers=3)
    expected = estimate(config, mode=Mode.FORWARD, batch_size=4, seq_len=512, device_type="cpu")
    _, profile = time_then_profile_generation(lambda: None, CPU, expected=expected)
    products = sum(
        operation.flops for operation in expected.operations if operation.matmul and not operation.is_attention_core
    )
    assert profile.rates == DeviceRates(matmul_flops=1e11, bandwidth=1e15)
    assert profile.bounds[ProfileCategory.PRODUCTS] == pytest.approx(products / 1e11)


def test_device_rates_are_work_divided_by_time(monkeypatch):
    monkeypatch.setattr(Timer, "measure_kernel", lambda _timer, _work: 0.5)
    assert measure_device_rates(CPU, Precision.FLOAT32) == DeviceRates(
        matmul_flops=2 * 1024**3 / 0.5, bandwidth=4 * 2**25 / 0.5
    )


KERNELS = {
    "accel/cuda/triton_batch_kernels.py": [],
    "accel/cuda/triton_row_kernels.py": [],
    "accel/cuda/linear_gelu_kernel.py": [],
    "accel/cuda/fused_autograd_kernels.py": [
        "normal_tail",
        "gelu",
        "biased_gelu_kernel",
        "biased_gelu_backward_kernel",
        "copy_and_sum_columns",
        "concat_and_sum_columns_kernel",
    ],
    "accel/cuda/norm_backward_kernel.py": [],
    "accel/cuda/varlen_kernel.py": [],
    "accel/cuda/loss_kernel.py": [],
}
"""Files with Triton kernels, with the functions that are element-wise or not launched themselves."""


def test_all_files_with_kernels_are_listed():
    package = Path(qkv.__file__).parent
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if "@triton.jit" in path.read_text()}
    assert files == {*KERNELS, "accel/cuda/triton_functions.py"}


@pytest.mark.parametrize("file", KERNELS)
def test_each_triton_kernel_has_a_category(file):
    tree = ast.parse((Path(qkv.__file__).parent / file).read_text())
    names = [
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, function.decorator_list)
    ]
    launched = [name for name in names if not name.startswith("_") and name not in KERNELS[file]]
    assert names
    assert set(KERNELS[file]) <= set(names)
    assert {
        name: _category_of_operation_name(name)
        for name in launched
        if _category_of_operation_name(name) is ProfileCategory.ELEMENTWISE
    } == {}


def test_overlapping_kernels_are_not_counted_twice():
    ranges = [Interval(a, b) for a, b in ((0.0, 10.0), (4.0, 13.0), (5.0, 9.0), (20.0, 21.0), (12.0, 15.0))]
    assert durations_without_earlier_overlap(ranges) == [10.0, 3.0, 0.0, 1.0, 2.0]
