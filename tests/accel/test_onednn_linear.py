"""Tests for linear layers through oneDNN in training steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.accel.cpu import onednn_linear
from qkv.choices import ScheduleKind
from qkv.config import GPTConfig, TrainingConfig
from qkv.data.token_batches import TokenBatch
from qkv.models import GPT
from qkv.nn import Unembedding
from qkv.training import Trainer, TrainingData
from qkv.training.checkpoint import RunFolder
from qkv.training.gpt import next_token_objective
from qkv.training.objectives import LossOutput
from qkv.training.step import build_train_step

pytestmark = pytest.mark.skipif(not onednn_linear.has_onednn(), reason="torch was built without oneDNN")

TRAINING = TrainingConfig(
    steps=3, batch_size=2, seq_len=7, learning_rate=1e-2, schedule=ScheduleKind.CONSTANT, warmup_steps=0
)


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, context_length=7, d_model=20, n_heads=5, n_layers=2, tie_embeddings=False))


def batch() -> TokenBatch:
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(3))
    return TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, torch.full((2,), 7))


def losses(folder: Path, *, checkpointing: bool = False) -> list[float]:
    folder.mkdir(exist_ok=True)
    model, losses_ = gpt().train(), list[float]()
    training = TRAINING.replace(activation_checkpointing=checkpointing)
    if checkpointing:
        model.blocks.activation_checkpointing = True
    trainer = Trainer(
        build_train_step(model, training, lambda: next_token_objective(model, training)),
        data=TrainingData(batch=lambda _: batch()),
        run=RunFolder(folder),
        texts={},
        report=lambda entry: losses_.append(entry["loss"]),
    )
    for _ in range(3):
        trainer.run_step(batch())
    return losses_


@pytest.fixture
def weight_shapes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Records the shapes of the weights that oneDNN multiplies by in forward passes."""
    shapes, original = list[torch.Size](), onednn_linear.onednn_linear

    def recording_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append(weight.shape)
        return original(x, weight, bias)

    monkeypatch.setattr(onednn_linear, "onednn_linear", recording_linear)
    return shapes


@pytest.mark.parametrize("has_bias", [True, False])
def test_onednn_linear_and_its_gradients_equal_those_of_torch(has_bias: bool) -> None:
    x, weight = torch.randn(2, 3, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    inputs = [x, weight, *([torch.randn(5, requires_grad=True)] if has_bias else [])]
    bias = inputs[2] if has_bias else None
    grad_output = torch.randn(2, 3, 5)
    torch.testing.assert_close(onednn_linear.onednn_linear(x, weight, bias), F.linear(x, weight, bias))
    gradients = torch.autograd.grad(onednn_linear.onednn_linear(x, weight, bias), inputs, grad_output)
    torch.testing.assert_close(gradients, torch.autograd.grad(F.linear(x, weight, bias), inputs, grad_output))


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.randn(3, 7, requires_grad=True), torch.randn(5, 7)
    onednn_linear.onednn_linear(x, weight, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 7))


def test_training_with_onednn_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_shapes: list[torch.Size]
) -> None:
    default = losses(tmp_path / "default")
    assert not weight_shapes
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    onednn = losses(tmp_path / "onednn")
    assert len(weight_shapes) == 3 * (2 * 6 + 1)
    assert onednn == pytest.approx(default, abs=1e-5)


def test_onednn_works_with_activation_checkpointing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = losses(tmp_path / "default")
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    assert losses(tmp_path / "again", checkpointing=True) == pytest.approx(default, abs=1e-5)


def test_small_matrices_do_not_use_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_shapes: list[torch.Size]
) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 61 * 20)
    losses(tmp_path)
    assert set(weight_shapes) == {torch.Size((61, 20)), torch.Size((80, 20)), torch.Size((20, 80))}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"compile": True}, "compile=true"),
        ({"activation_checkpointing": True}, "activation_checkpointing=true"),
        ({"precision": "bf16"}, "precision='bf16'"),
    ],
)
def test_the_reason_names_the_unsupported_setting(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    actual = onednn_linear.reason_onednn_is_unsupported(gpt(), TRAINING.replace(**changes))
    assert actual is None if reason is None else str(actual).startswith(reason)


def test_only_float32_gpts_with_large_matrices_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "weight matrix" in str(onednn_linear.reason_onednn_is_unsupported(gpt(), TRAINING))
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    assert "GPT" in str(onednn_linear.reason_onednn_is_unsupported(nn.Linear(7, 5), TRAINING))
    assert "float32" in str(onednn_linear.reason_onednn_is_unsupported(gpt().double(), TRAINING))


def test_modules_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    model = gpt()

    def fail(_: object) -> LossOutput:
        assert isinstance(model.unembedding, onednn_linear.OneDNNUnembedding)
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        build_train_step(model, TRAINING, lambda: fail)(batch(), 0, learning_rate=0.1)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    assert type(model.unembedding) is Unembedding
