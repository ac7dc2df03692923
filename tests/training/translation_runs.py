"""Translation runs that are small enough to be created, killed and resumed in a second."""

from pathlib import Path

from qkv.config import Recipe
from qkv.training import PreparedRun, prepare_run, write_fingerprints_and_final_recipe
from tests.data.pair_corpus import reversed_pairs, write_tsv

MODELS = {
    "seq2seq": {
        "context_length": 40,
        "d_model": 28,
        "n_heads": 2,
        "n_encoder_layers": 2,
        "n_decoder_layers": 1,
        "positions": "rotary",
        "norm_position": "pre",
        "final_norm": True,
        "dropout": 0.1,
    },
    "rnn": {"context_length": 40, "d_model": 28, "dropout": 0.1, "tie_embeddings": True},
}


def recipe(family: str, *, data=None, pairs=None, **training) -> Recipe:
    defaults = {
        "steps": 7,
        "batch_size": 6,
        "micro_batch_size": 3,
        "seq_len": 24,
        "warmup_steps": 2,
        "eval_every": 3,
        "save_every": 2,
        "label_smoothing": 0.1,
        "ema_decay": 0.9,
        "optimizer": "muon",
    }
    return Recipe(
        family=family,
        tokenizer={"vocab_size": 280},
        model=MODELS[family],
        data={"train": ("pairs.tsv",), "validation_fraction": 0.1} | (data or {}),
        pairs={"join_fraction": 0.3, "n_eval_translations": 11} | (pairs or {}),
        training=defaults | training,
    )


def prepare_small_run(folder: Path, settings: Recipe) -> PreparedRun:
    folder.mkdir(exist_ok=True)
    write_tsv(folder / "pairs.tsv", reversed_pairs(200, longest=9))
    prepared = prepare_run(settings, folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    return prepared
