"""Where time goes: every kind is told by what was called, all of it adds up, and the bound is the cost's."""

import ast
import json
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler_util import Interval

import qkv
from qkv.choices import WorkKind
from qkv.config import GPTConfig
from qkv.cost import Mode, Precision, estimate
from qkv.training.profiling import _kind, measure_rates, own_times, profile_generation, profile_training
from tests.training.runs import make_ready, trainer_of

CPU = torch.device("cpu")


def test_what_is_called_says_its_kind_and_all_adds_up():
    x = torch.randn(64, 3, 32, 16)
    weight = torch.randn(700, 700)

    def work():
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.nn.functional.rms_norm(x, (16,))
        return weight @ weight

    work()
    result, profile = profile_generation(work, CPU, expected=None)
    assert torch.equal(result, weight @ weight)
    assert {WorkKind.PRODUCTS, WorkKind.ATTENTION, WorkKind.NORM} <= {
        kind for kind, s in profile.spent.items() if s > 0
    }
    assert profile.spent[WorkKind.PRODUCTS] > profile.spent[WorkKind.NORM]
    assert sum(profile.spent.values()) == pytest.approx(profile.seconds, rel=0.02)
    assert profile.bound is None


def test_a_gradient_is_of_the_kind_of_what_it_is_the_gradient_of():
    """The parts of attention with dropout are plain products and masks, forward and back."""
    x = torch.randn(8, 4, 64, 16, requires_grad=True)

    def work():
        torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum().backward()

    work()
    _, profile = profile_generation(work, CPU, expected=None)
    assert profile.spent[WorkKind.ATTENTION] > 0.5 * (profile.seconds - profile.spent[WorkKind.BETWEEN])
    assert profile.spent.get(WorkKind.PRODUCTS, 0.0) < 0.1 * profile.seconds


def test_a_training_step_has_data_loss_and_optimizer_and_leaves_a_trace(tmp_path):
    trainer = trainer_of(make_ready(tmp_path / "run", steps=3, save_every=3, eval_every=3))
    step = estimate(GPTConfig(vocab_size=97, context_length=16, d_model=12, n_heads=3, n_layers=2), mode="train")
    profile = profile_training(trainer, step, trace=tmp_path / "trace.json")
    for kind in (WorkKind.DATA, WorkKind.LOSS, WorkKind.OPTIMIZER, WorkKind.PRODUCTS, WorkKind.EMBEDDING):
        assert profile.spent[kind] > 0
    assert profile.bounds.keys() >= {WorkKind.OPTIMIZER, WorkKind.ATTENTION, WorkKind.PRODUCTS, WorkKind.NORM}
    assert profile.bound == pytest.approx(sum(profile.bounds.values()))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_bound_of_products_is_their_flops_at_the_measured_rate():
    config = GPTConfig(vocab_size=8192, context_length=512, d_model=512, n_heads=8, n_layers=3)
    made = estimate(config, mode=Mode.FORWARD, batch=4, length=512, backend="cpu")
    _, profile = profile_generation(lambda: None, CPU, expected=made)
    products = sum(one.flops for one in made.operations if one.product and not one.is_attention_core)
    assert profile.rates is not None
    assert profile.bounds[WorkKind.PRODUCTS] == pytest.approx(products / profile.rates.products, rel=0.2)
    assert measure_rates(CPU, Precision.FLOAT32).memory > 1e8


KERNELS = {
    "generation/gpu_kernels.py": [],
    "generation/gpu_row_kernels.py": [],
    "nn/expanding.py": [],
    "nn/gradient_kernels.py": ["tail", "gelu", "gelu_tile", "gelu_gradient_tile", "copy_part", "beside_tile"],
    "nn/norm_kernel.py": [],
    "nn/short_texts.py": [],
    "training/loss_kernel.py": [],
}
"""Files with kernels of ours, and what of them is element-wise or no kernel by itself."""


def test_these_are_all_files_with_kernels():
    package = Path(qkv.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if "@triton.jit" in path.read_text()}
    assert found == {*KERNELS, "generation/gpu_kernel_parts.py"}


@pytest.mark.parametrize("file", KERNELS)
def test_each_kernel_of_ours_has_a_kind(file):
    tree = ast.parse((Path(qkv.__file__).parent / file).read_text())
    names = [
        one.name
        for one in tree.body
        if isinstance(one, ast.FunctionDef) and "triton.jit" in map(ast.unparse, one.decorator_list)
    ]
    launched = [name for name in names if not name.startswith("_") and name not in KERNELS[file]]
    assert names
    assert set(KERNELS[file]) <= set(names)
    assert {name: _kind(name) for name in launched if _kind(name) is WorkKind.ELEMENTWISE} == {}


def test_kernels_that_overlap_are_not_counted_twice():
    ranges = [Interval(a, b) for a, b in ((0.0, 10.0), (4.0, 13.0), (5.0, 9.0), (20.0, 21.0), (12.0, 15.0))]
    assert own_times(ranges) == [10.0, 3.0, 0.0, 1.0, 2.0]
