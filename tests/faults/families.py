"""Runs of every family that are small enough to be created, killed and resumed in a second."""

from pathlib import Path

from qkv.training import PreparedRun, prepare_run, write_fingerprints_and_final_recipe
from tests.data.pair_corpus import reversed_pairs, write_tsv
from tests.training import runs, test_bert, translation_runs

FAMILIES = ("gpt", "bert", "seq2seq", "rnn")
RECIPES = {
    "gpt": runs.recipe(),
    "bert": test_bert.recipe(),
    "seq2seq": translation_runs.recipe("seq2seq"),
    "rnn": translation_runs.recipe("rnn"),
}


def write_data(folder: Path, family: str, **training) -> Path:
    """Write the training data of the family, and its recipe as `a.toml`."""
    folder.mkdir(exist_ok=True)
    if family in ("seq2seq", "rnn"):
        write_tsv(folder / "pairs.tsv", reversed_pairs(200, longest=9))
    else:
        (test_bert.write_texts if family == "bert" else runs.write_text)(folder / "text.txt")
    settings = RECIPES[family]
    (folder / "a.toml").write_text(settings.replace(training=settings.training.replace(**training)).to_toml())
    return folder


def prepare_small_run(folder: Path, family: str) -> PreparedRun:
    """Prepare a new run in `folder`/run."""
    write_data(folder, family)
    prepared = prepare_run(RECIPES[family], folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    write_fingerprints_and_final_recipe(prepared)
    return prepared
