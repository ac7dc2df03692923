"""A run of every family, small enough to be made, killed and resumed in a second."""

from pathlib import Path

from qkv.training import PreparedRun, finish_preparation, prepare_run
from tests.data.pair_corpus import reversed_pairs, write_tsv
from tests.training import runs, test_bert, translations

FAMILIES = ("gpt", "bert", "seq2seq", "rnn")
RECIPES = {
    "gpt": runs.recipe(),
    "bert": test_bert.recipe(),
    "seq2seq": translations.recipe("seq2seq"),
    "rnn": translations.recipe("rnn"),
}


def write_data(folder: Path, family: str, **training) -> Path:
    """The texts that the family learns from, and its recipe as `a.toml`."""
    folder.mkdir(exist_ok=True)
    if family in ("seq2seq", "rnn"):
        write_tsv(folder / "pairs.tsv", reversed_pairs(200, longest=9))
    else:
        (test_bert.write_texts if family == "bert" else runs.write_text)(folder / "text.txt")
    chosen = RECIPES[family]
    (folder / "a.toml").write_text(chosen.replace(training=chosen.training.replace(**training)).to_toml())
    return folder


def make_ready(folder: Path, family: str) -> PreparedRun:
    """A new run in `folder`/run."""
    write_data(folder, family)
    prepared = prepare_run(RECIPES[family], folder / "run", folder, progress=lambda _label: lambda _n, _all: None)
    finish_preparation(prepared)
    return prepared
