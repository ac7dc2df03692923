"""`qkv data split`, and `qkv train translate` on pairs."""

import json

from qkv.data.pair_files import normalize_sentence
from tests.cli.answers import assert_error
from tests.cli.test_train import command  # noqa: F401 - a fixture
from tests.data.pair_corpus import reversed_pairs, write_tsv


def test_pairs_are_split_without_leakage_and_a_random_split_reports_it(command, tmp_path):  # noqa: F811
    write_tsv(tmp_path / "pairs.tsv", [*reversed_pairs(900, longest=5), ("", "EMPTY")])
    answer = command("data", "split", "pairs.tsv", "--dev", 13, "--test", 29, "--out", "parts")
    assert answer.status == 0
    assert answer.err.startswith("qkv: ignored 1 pairs ")
    assert "29 pairs  0.0% " in answer.out
    read = {name: (tmp_path / "parts" / f"{name}.tsv").read_text().splitlines() for name in ("train", "dev", "test")}
    assert [len(lines) for lines in read.values()] == [858, 13, 29]
    train, dev, test = (
        {normalize_sentence(text) for line in lines for text in line.split("\t")} for lines in read.values()
    )
    assert not (train | dev) & test
    assert not train & dev
    leaky = command("data", "split", "pairs.tsv", "--dev", 13, "--test", 29, "--random", "--json", "--out", "leaky")
    assert json.loads(leaky.out)["test"]["shared_with_train"] > 0.1
    assert_error(command("data", "split", "pairs.tsv", "--out", "parts"), "--out parts: ", ".tsv")


def test_a_translator_is_trained_without_a_recipe(command, tmp_path):  # noqa: F811
    write_tsv(tmp_path / "pairs.tsv", reversed_pairs(300, shortest=3))
    for option in ([], ["--rnn"]):
        out = f"run{len(option)}"
        answer = command(
            "train", "translate", "--pairs", "pairs.tsv", *option, "--steps", 2, "--out", out, "--device", "cpu"
        )
        assert answer.status == 0
        assert answer.out.startswith(f"{out}: 2 steps")
        assert " pairs" in answer.err
        assert "bleu" in answer.err
