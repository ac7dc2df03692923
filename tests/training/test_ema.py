"""The running average of the weights: what it is, and that it is what is evaluated and kept."""

import torch
from safetensors.torch import load_file

from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.training.ema import EMA
from tests.training.runs import checkpoints, curve, go_on, stopped_after, trainer_of


def small():
    return GPT(GPTConfig(vocab_size=5, context_length=3, n_layers=1, d_model=4, n_heads=2))


def test_the_average_follows_its_formula():
    model = small()
    averaged = EMA(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        averaged.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
    for name, average in averaged.weights.items():
        torch.testing.assert_close(average, expected[name])


def test_inside_the_with_the_model_is_the_average_and_afterwards_itself_again():
    model = small()
    averaged = EMA(model, 0.9)
    before = {name: average.clone() for name, average in averaged.weights.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    with averaged.apply_to_model():
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    assert all(torch.equal(average, before[name]) for name, average in averaged.weights.items())


def test_the_average_is_what_is_kept_and_a_resumed_run_is_the_unbroken_one(run):
    whole = run("whole", ema_decay=0.6)
    trainer = trainer_of(whole)
    trainer.train()
    kept = load_file(whole.run.checkpoint_folder(13) / "model.safetensors")
    assert all(torch.equal(kept[name], average) for name, average in trainer.averaged.weights.items())
    assert not torch.equal(kept["blocks.0.attention.q_proj.weight"], trainer.model.blocks[0].attention.q_proj.weight)
    stopped = run("stopped", ema_decay=0.6)
    stopped_after(trainer_of(stopped), 7)
    go_on(stopped.run.path)
    assert curve(stopped.run.path) == curve(whole.run.path)
    assert checkpoints(stopped.run.path) == checkpoints(whole.run.path)
