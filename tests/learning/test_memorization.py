"""A tiny GPT that is trained on a short text reproduces it."""

import torch

from qkv.config import Recipe
from qkv.text import Tokenizer
from qkv.training import build_trainer, prepare_run, write_fingerprints_and_final_recipe

TEXT = (
    "In the beginning there was a small model, and it knew nothing. "
    "It read one sentence, then the next, and then both again. "
    "After a while it could say them by heart, every letter in its place."
)


def recipe(**training) -> Recipe:
    return Recipe(
        family="gpt",
        tokenizer={"kind": "char", "vocab_size": 60},
        model={"context_length": 64, "n_layers": 2, "d_model": 48, "n_heads": 3, "positions": "rotary"},
        data={"train": ("text.txt",)},
        training={
            "steps": 200,
            "batch_size": 4,
            "seq_len": 64,
            "optimizer": "muon",
            "learning_rate": 1e-2,
            "schedule": "linear",
            "min_lr_ratio": 0.0,
            "warmup_steps": 10,
            "save_every": 200,
        }
        | training,
    )


def generate_greedily(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, n: int) -> str:
    """Generate greedily without a cache."""
    ids = tokenizer.encode(prompt)
    for _ in range(n):
        logits = model(torch.tensor([ids[-48:]]))
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids)


def test_a_tiny_gpt_memorizes_a_text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    prepared = prepare_run(recipe(), tmp_path / "run", tmp_path, progress=lambda _label: lambda _done, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    losses = []
    trainer = build_trainer(prepared, device=torch.device("cpu"), report=lambda entry: losses.append(entry["loss"]))
    trainer.train()
    assert losses[0] > 3.0
    assert losses[-1] < 0.1
    prompt = TEXT[:40]
    with torch.inference_mode():
        assert generate_greedily(trainer.model.eval(), prepared.corpus.tokenizer, prompt, len(TEXT) - 40) == TEXT
