"""`qkv data split` and `qkv train translate`: pairs in, parts or a translator out."""

import json

from qkv.data.pair_split import normalize_sentence
from tests.cli.test_train import command, refused  # noqa: F401 - a fixture
from tests.data.pair_corpus import reversed_pairs, write_tsv


def test_pairs_are_split_without_a_leak_and_a_random_split_says_its_own(command, tmp_path):  # noqa: F811
    write_tsv(tmp_path / "pairs.tsv", [*reversed_pairs(900, longest=5), ("", "EMPTY")])
    answer = command("data", "split", "pairs.tsv", "--dev", 13, "--test", 29, "--out", "parts")
    assert answer.status == 0
    assert "1 pairs with an empty side are left out" in answer.err
    assert "29 pairs  0.0% share a sentence with training" in answer.out
    read = {name: (tmp_path / "parts" / f"{name}.tsv").read_text().splitlines() for name in ("train", "dev", "test")}
    assert [len(lines) for lines in read.values()] == [858, 13, 29]
    train, dev, test = ({normalize_sentence(text) for line in lines for text in line.split("\t")} for lines in read.values())
    assert not (train | dev) & test
    assert not train & dev
    leaky = command("data", "split", "pairs.tsv", "--dev", 13, "--test", 29, "--random", "--json", "--out", "leaky")
    assert json.loads(leaky.out)["test"]["shared_with_train"] > 0.1
    refused(
        command("data", "split", "pairs.tsv", "--out", "parts"),
        "--out parts: is not empty (it holds dev.tsv); name a new folder".replace("dev.tsv", held(tmp_path)),
    )


def held(folder) -> str:
    return next((folder / "parts").iterdir()).name


def test_own_pairs_need_no_recipe(command, tmp_path):  # noqa: F811
    write_tsv(tmp_path / "pairs.tsv", reversed_pairs(300, shortest=3))
    for option in ([], ["--rnn"]):
        out = f"run{len(option)}"
        answer = command(
            "train", "translate", "--pairs", "pairs.tsv", *option, "--steps", 2, "--out", out, "--device", "cpu"
        )
        assert answer.status == 0
        assert answer.out.startswith(f"{out}: 2 steps")
        assert "pairs to train on" in answer.err
        assert "bleu" in answer.err
