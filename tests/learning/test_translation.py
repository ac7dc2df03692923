"""Both translation families learn to reverse sentences, from a file of pairs to generated text."""

import json

import pytest
import torch

from qkv.config import Recipe
from qkv.tasks import load
from qkv.training import build_trainer, prepare_run, write_fingerprints_and_final_recipe
from tests.data.pair_corpus import reversed_pairs, write_tsv

MODELS = {
    "seq2seq": {
        "n_heads": 4,
        "n_encoder_layers": 1,
        "n_decoder_layers": 1,
        "positions": "rotary",
        "norm_position": "pre",
        "final_norm": True,
        "init_std": 0.05,
    },
    "rnn": {},
}


@pytest.mark.parametrize(("family", "rate"), [("seq2seq", 5e-3), ("rnn", 1e-2)])
def test_a_translator_learns_to_reverse_and_capitalize(family, rate, tmp_path):
    pairs = [(source.replace(" ", ""), target.replace(" ", "")) for source, target in reversed_pairs(9000, longest=5)]
    write_tsv(tmp_path / "pairs.tsv", pairs)
    recipe = Recipe(
        family=family,
        tokenizer={"kind": "char", "vocab_size": 30},
        model={"context_length": 32, "d_model": 64, **MODELS[family]},
        data={"train": ("pairs.tsv",), "validation_fraction": 0.02},
        pairs={"join_fraction": 0.0, "n_eval_translations": 20},
        training={
            "steps": 250,
            "batch_size": 32,
            "seq_len": 16,
            "learning_rate": rate,
            "weight_decay": 0.0,
            "schedule": "linear",
            "min_lr_ratio": 0.0,
            "warmup_steps": 20,
            "eval_every": 250,
            "label_smoothing": 0.1,
            "ema_decay": 0.9,
        },
    )
    prepared = prepare_run(recipe, tmp_path / "run", tmp_path, progress=lambda _label: lambda _n, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    build_trainer(prepared, device=torch.device("cpu"), report=lambda _entry: None).train()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_accuracy"] >= 0.95, last
    assert load(tmp_path / "run").translate("abcd", beam=1) == "DCBA"
