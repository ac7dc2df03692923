"""Tests for AdamW and Muon."""

import pytest
import torch
from torch.nn import functional as F

from qkv.choices import OptimizerKind
from qkv.config import GPTConfig, TrainingConfig
from qkv.errors import RunError
from qkv.models import GPT
from qkv.training.optimizer import (
    Muon,
    build_optimizers,
    clip_gradients,
    load_optimizer_state,
    optimizer_state_tensors,
    orthogonalize,
    set_learning_rate,
)

CONFIG = GPTConfig(vocab_size=19, context_length=13, n_layers=2, d_model=14, n_heads=2)


def training(kind, **changes):
    return TrainingConfig(steps=9, batch_size=1, seq_len=13, warmup_steps=0, optimizer=kind, **changes)


def step(model, optimizers, seed=0):
    ids = torch.randint(0, 19, (3, 13), generator=torch.Generator().manual_seed(seed))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("limit", [0.01, 100.0])
@pytest.mark.parametrize("kind", OptimizerKind)
def test_clipping_fused_into_the_step_equals_clipping_before_it(kind, limit):
    models = [GPT(CONFIG, seed=1) for _ in range(2)]
    for model, fuse_into_step in zip(models, (False, True), strict=True):
        optimizers = build_optimizers(model, training(kind))
        for seed in range(3):
            loss = (
                model(torch.randint(0, 19, (3, 13), generator=torch.Generator().manual_seed(seed))).logsumexp(-1).sum()
            )
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            assert 0.01 < norm < 100
            for optimizer in optimizers:
                clip_gradients(optimizer, norm, limit, fuse_into_step=fuse_into_step)
                optimizer.step()
                optimizer.zero_grad()
    for expected, actual in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(expected, actual)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 31, 7), (2, 5, 64)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.max() < 1.3
    # A random square matrix has singular values near 0, which five steps do not raise to 1.
    assert values.median() > 0.65
    if shape[1] != shape[2]:
        assert values.min() > 0.5


def test_orthogonalization_keeps_the_singular_vectors():
    matrix = torch.randn(1, 7, 31, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    in_singular_basis = (u.mT @ orthogonalize(matrix) @ v.mT)[0]
    assert (in_singular_basis - in_singular_basis.diag().diag()).abs().max() < 1e-3


def test_muon_scales_its_update_by_the_longer_side():
    weight = torch.nn.Parameter(torch.randn(5, 20))
    before, gradient = weight.detach().clone(), torch.randn(5, 20)
    weight.grad = gradient
    Muon([weight], lr=0.1, momentum=0.0, weight_decay=0.0).step()
    expected = before - 0.1 * 0.2 * 20**0.5 * orthogonalize(gradient[None])[0]
    torch.testing.assert_close(weight.detach(), expected)


def test_muon_optimizes_block_matrices_and_adamw_the_rest():
    model = GPT(CONFIG)
    adamw, muon = build_optimizers(model, training(OptimizerKind.MUON))
    named = {id(p): name for name, p in model.named_parameters()}
    muon_names = [named[id(p)] for group in muon.param_groups for p in group["params"]]
    adamw_names = [named[id(p)] for group in adamw.param_groups for p in group["params"]]
    assert len(muon_names) == 2 * 6
    assert all(".weight" in name and name.startswith("blocks.") and "norm" not in name for name in muon_names)
    assert sorted(muon_names + adamw_names) == sorted(named.values())


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_weight_decay_applies_to_matrices_only(kind):
    for optimizer in build_optimizers(GPT(CONFIG), training(kind, weight_decay=0.3)):
        for group in optimizer.param_groups:
            assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] > 0}


def test_layer_decay_lowers_the_learning_rate_of_lower_layers():
    model = GPT(CONFIG)
    (optimizer,) = build_optimizers(model, training(OptimizerKind.ADAMW, layer_decay=0.5))
    set_learning_rate(optimizer, 8.0)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: rate[id(p)] for name, p in model.named_parameters()}
    assert {named[name] for name in named if name.startswith("embedding.")} == {1.0}
    assert {named[name] for name in named if name.startswith("blocks.0.")} == {2.0}
    assert {named[name] for name in named if name.startswith("blocks.1.")} == {4.0}
    assert named["final_norm.weight"] == 8.0


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_restored_optimizers_continue_bit_for_bit(kind):
    model, twin = GPT(CONFIG, seed=1), GPT(CONFIG, seed=2)
    optimizers = build_optimizers(model, training(kind))
    for seed in range(3):
        step(model, optimizers, seed)
    others = build_optimizers(twin, training(kind))
    twin.load_state_dict(model.state_dict())
    state = {name: tensor.clone() for name, tensor in optimizer_state_tensors(model, optimizers).items()}
    load_optimizer_state(twin, others, state)
    for seed in range(3, 6):
        step(model, optimizers, seed)
        step(twin, others, seed)
    for expected, actual in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_the_state_of_another_optimizer_raises_an_error():
    model = GPT(CONFIG)
    muon = build_optimizers(model, training(OptimizerKind.MUON))
    step(model, muon)
    state = optimizer_state_tensors(model, muon)
    with pytest.raises(RunError, match=r"'blocks\.0\..*momentum_buffer'"):
        load_optimizer_state(model, build_optimizers(model, training(OptimizerKind.ADAMW)), state)


def error_after(kind, learning_rate, n_steps=100):
    """Returns the error of a linear map learned from inputs whose directions differ in scale by a factor of 100."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(24, 24, generator=generator))[0]
    inputs = torch.randn(128, 24, generator=generator) * torch.logspace(0, -2, 24) @ rotation
    target = torch.linalg.qr(torch.randn(24, 24, generator=generator))[0]
    weight = torch.nn.Parameter(torch.zeros(24, 24))
    if kind is OptimizerKind.MUON:
        optimizer = Muon([weight], lr=learning_rate, momentum=0.95, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW([weight], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for i in range(n_steps):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - i / n_steps)
        ((inputs @ (weight - target)) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(((inputs @ (weight - target)) ** 2).mean().detach())


def test_muon_learns_faster_than_adamw_each_at_its_best_learning_rate():
    grid = (0.01, 0.03, 0.1, 0.3)
    muon, adamw = (min(error_after(kind, rate) for rate in grid) for kind in (OptimizerKind.MUON, OptimizerKind.ADAMW))
    assert muon < adamw / 10


@pytest.mark.parametrize("shape", [(2, 5, 13), (3, 11, 7)])
def test_orthogonalization_equals_the_explicit_quintic(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x = matrices if shape[1] < shape[2] else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    expected = x if shape[1] < shape[2] else x.mT
    torch.testing.assert_close(orthogonalize(matrices), expected, atol=1e-6, rtol=1e-5)
