"""LoRA: starts as the model was, trains two thin matrices alone, and leaves as plain weights."""

import pytest
import torch
from safetensors.torch import load_file

from qkv.config import GPTConfig
from qkv.errors import ConfigError
from qkv.models import GPT
from qkv.training.lora import freeze_and_add_attention_lora, merged_weights
from qkv.weights.model_loader import load_model
from tests.training.runs import (
    build_cpu_trainer,
    checkpoint_contents,
    logged_metrics,
    resume_to_end,
    train_until_signal,
)

CONFIG = GPTConfig(vocab_size=19, context_length=13, n_layers=2, d_model=14, n_heads=2)


def test_lora_leaves_the_output_unchanged_and_trains_only_its_matrices():
    model, ids = GPT(CONFIG, seed=3), torch.randint(0, 19, (2, 7))
    before = model(ids)
    freeze_and_add_attention_lora(model, rank=3, seed=0)
    assert torch.equal(model(ids), before)
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(free) == 2 * 4 * 2
    assert all(name.endswith((".down", ".up")) for name in free)


def test_merged_weights_give_the_same_output():
    model, ids = GPT(CONFIG, seed=3), torch.randint(0, 19, (2, 7))
    freeze_and_add_attention_lora(model, rank=3, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".up"):
                p.normal_()
    plain = GPT(CONFIG, seed=4)
    merged = merged_weights(model)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(merged[name])
    assert torch.equal(plain(ids), model(ids))
    assert not torch.equal(plain(ids), GPT(CONFIG, seed=3)(ids))


def test_a_rank_above_the_matrix_size_raises_an_error():
    with pytest.raises(ConfigError, match=r"lora_rank .*\b14\b.*, got 15$"):
        freeze_and_add_attention_lora(GPT(CONFIG), rank=15, seed=0)


def test_a_resumed_lora_run_is_identical_and_its_checkpoint_is_a_plain_model(run):
    uninterrupted, stopped = run("uninterrupted", lora_rank=2), run("stopped", lora_rank=2)
    trainer = build_cpu_trainer(uninterrupted)
    trainer.train()
    train_until_signal(build_cpu_trainer(stopped), 7)
    resume_to_end(stopped.run.path)
    assert logged_metrics(stopped.run.path) == logged_metrics(uninterrupted.run.path)
    assert checkpoint_contents(stopped.run.path) == checkpoint_contents(uninterrupted.run.path)
    saved = load_file(uninterrupted.run.checkpoint_folder(13) / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in merged_weights(trainer.model).items())
    loaded, ids = load_model(uninterrupted.run.checkpoint_folder(13)).model, torch.randint(0, 16, (2, 7))
    trainer.model.eval()
    assert torch.equal(loaded(ids), trainer.model(ids))
