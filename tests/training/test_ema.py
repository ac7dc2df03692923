"""Tests for the exponential moving average of the weights."""

import torch
from safetensors.torch import load_file

from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.training.optimizer import EMA
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)


def small_gpt():
    return GPT(GPTConfig(vocab_size=5, context_length=3, n_layers=1, d_model=4, n_heads=2))


def test_the_ema_follows_its_formula():
    model = small_gpt()
    ema = EMA(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
    for name, average in ema.weights.items():
        torch.testing.assert_close(average, expected[name])


def test_apply_to_model_swaps_the_weights_and_restores_them():
    model = small_gpt()
    ema = EMA(model, 0.9)
    before = {name: average.clone() for name, average in ema.weights.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    raw = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ema.apply_to_model():
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())
    assert all(torch.equal(average, before[name]) for name, average in ema.weights.items())


def test_checkpoints_hold_the_ema_and_a_resumed_run_equals_an_uninterrupted_one(run):
    uninterrupted = run("uninterrupted", ema_decay=0.6)
    trainer = build_cpu_trainer(uninterrupted)
    trainer.train()
    saved = load_file(uninterrupted.run.checkpoint_folder(13) / "model.safetensors")
    assert all(torch.equal(saved[name], average) for name, average in trainer.ema.weights.items())
    assert not torch.equal(saved["blocks.0.attention.q_proj.weight"], trainer.model.blocks[0].attention.q_proj.weight)
    stopped = run("stopped", ema_decay=0.6)
    train_until_signal(build_cpu_trainer(stopped), 7)
    resume_to_end(stopped.run.path)
    assert logged_metrics(stopped.run.path) == logged_metrics(uninterrupted.run.path)
    assert checkpoint_contents(stopped.run.path) == checkpoint_contents(uninterrupted.run.path)
