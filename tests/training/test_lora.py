"""LoRA: starts as the model was, trains two thin matrices alone, and leaves as plain weights."""

import pytest
import torch
from safetensors.torch import load_file

from qkv.config import GPTConfig
from qkv.errors import ConfigError
from qkv.models import GPT
from qkv.training.lora import add_lora, merged_weights
from qkv.weights.models import load_model
from tests.training.runs import checkpoints, curve, go_on, stopped_after, trainer_of

CONFIG = GPTConfig(vocab_size=19, context_length=13, n_layers=2, d_model=14, n_heads=2)


def test_it_starts_as_the_model_was_and_frees_the_thin_matrices_alone():
    model, ids = GPT(CONFIG, seed=3), torch.randint(0, 19, (2, 7))
    before = model(ids)
    add_lora(model, rank=3, seed=0)
    assert torch.equal(model(ids), before)
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(free) == 2 * 4 * 2
    assert all(name.endswith((".down", ".up")) for name in free)


def test_the_merged_weights_are_what_runs():
    model, ids = GPT(CONFIG, seed=3), torch.randint(0, 19, (2, 7))
    add_lora(model, rank=3, seed=0)
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


def test_a_rank_above_the_matrix_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="lora_rank=15 must not be more than the matrix's smaller side 14"):
        add_lora(GPT(CONFIG), rank=15, seed=0)


def test_a_resumed_run_is_the_unbroken_one_and_its_checkpoint_a_plain_model(run):
    whole, stopped = run("whole", lora_rank=2), run("stopped", lora_rank=2)
    trainer = trainer_of(whole)
    trainer.train()
    stopped_after(trainer_of(stopped), 7)
    go_on(stopped.run.path)
    assert curve(stopped.run.path) == curve(whole.run.path)
    assert checkpoints(stopped.run.path) == checkpoints(whole.run.path)
    kept = load_file(whole.run.checkpoint_folder(13) / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in merged_weights(trainer.model).items())
    loaded, ids = load_model(whole.run.checkpoint_folder(13)).model, torch.randint(0, 16, (2, 7))
    trainer.model.eval()
    assert torch.equal(loaded(ids), trainer.model(ids))
