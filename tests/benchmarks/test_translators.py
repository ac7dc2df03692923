"""Systems are scored alike, whether they are translated with here or bring their translations as files."""

import json

import pytest

from benchmarks.translators import Facts, System, keep, main, read, scores, trained
from qkv.config import RNNConfig
from qkv.models import RNNSeq2Seq
from qkv.tasks import Translator
from tests.tasks.small_translator import backwards, of_the_words, saved

SOURCES = [
    "uno dos tres cuatro", "cinco seis siete ocho nueve", "diez uno dos tres cuatro cinco", "seis siete ocho",
    "nueve diez uno dos", "tres tres cuatro uno siete", "ocho",
]  # fmt: skip
PAIRS = [(source, backwards(source)) for source in SOURCES]
RIGHT = [target for _, target in PAIRS]
WORSE = [f"{target.rpartition(' ')[0]} cien" for target in RIGHT]


def system(name, greedy, beam, **facts):
    written = {"greedy": greedy, "beam5": beam}
    return System(name=name, written=written, facts=Facts(parameters=13, **facts))


def untrained():
    tokenizer = of_the_words()
    config = RNNConfig(vocab_size=tokenizer.vocab_size, context_length=37, d_model=6)
    return Translator(RNNSeq2Seq(config, seed=3).eval(), tokenizer)


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return path


def test_a_system_that_was_kept_is_read_as_it_was(tmp_path):
    one = system("split, 7+3", WORSE, RIGHT, seconds=17.5, tokens_per_second=1234.5)
    keep(one, tmp_path)
    assert read("split, 7+3", tmp_path / "split-7-3.json") == one


def test_a_blank_translation_at_the_end_is_a_translation(tmp_path):
    one = system("blank", [*WORSE[:-1], ""], ["", *RIGHT[1:]])
    keep(one, tmp_path)
    assert read("blank", tmp_path / "blank.json") == one


def test_seconds_and_tokens_are_those_of_the_last_step(tmp_path):
    entries = [
        {"step": 1, "tokens": 7, "seconds": 1.0},
        {"step": 2, "tokens": 33, "seconds": 3.0},
        {"step": 2, "validation_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert trained(tmp_path) == {"seconds": 3.0, "tokens_per_second": 11.0}
    assert trained(tmp_path / "elsewhere") == {}


def test_each_search_has_its_own_score_and_the_peer_alone_no_chance():
    ours, peer = scores(
        [system("ours", WORSE, RIGHT), system("peer", WORSE, WORSE)], PAIRS, peer="peer", n_draws=101
    )  # fmt: skip
    assert ours.measured["beam5"]["BLEU"].score == pytest.approx(100)
    assert ours.measured["greedy"]["BLEU"].score < 90
    assert peer.measured["beam5"]["BLEU"].p_value is None
    assert ours.measured["beam5"]["BLEU"].p_value < 0.05
    assert ours.measured["greedy"]["BLEU"].p_value == 1.0
    assert [row["sentences"] for row in ours.by_length] == [6, 1]


def test_too_few_translations_are_refused():
    with pytest.raises(Exception, match=r"short, beam5: 6 translations for 7 sentences"):
        scores([system("short", RIGHT, RIGHT[1:])], PAIRS, peer=None, n_draws=11)


def test_a_model_and_files_stand_in_one_table_and_one_picture(tmp_path, pairs_file, capsys):
    keep(system("peer", WORSE, RIGHT, tokens_per_second=2345.0), tmp_path)
    model = untrained()
    out = tmp_path / "out"
    systems = [f"our model={saved(model, tmp_path / 'model')}", f"peer={tmp_path / 'peer.json'}"]
    assert main([*systems, "--pairs", str(pairs_file), "--out", str(out), "--peer", "peer", "--draws", "101"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| our", "| peer"))]
    ours, peer = (line.strip("| ").split(" | ") for line in lines)
    n_parameters = sum(weights.numel() for weights in model.model.parameters())
    assert ours[:4] == ["our model", f"{n_parameters:,}", "–", "–"]
    assert [peer[0], peer[3], peer[8]] == ["peer", "2,345", "–"]
    assert peer[6].startswith("100.00 [")
    kept = read("our model", out / "our-model.json").written
    assert kept == {"greedy": model.translate(SOURCES, beam=1), "beam5": model.translate(SOURCES, beam=5)}
    assert (out / "translators.png").stat().st_size > 9_000
    _, figures = json.loads((out / "translators.json").read_text())
    assert figures["beam5"]["BLEU"]["score"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["no-sign"], "no-sign: is not NAME=PLACE"),
        (["a=gone"], "a=gone: is not NAME=PLACE"),
        (["a=x", "a=y"], "2 systems have 1 names"),
        (["a=x", "--peer", "b"], "--peer b: is none of the systems (a)"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_line(tmp_path, pairs_file, capsys, asked, why):
    with pytest.raises(SystemExit, match="2"):
        main([*asked, "--pairs", str(pairs_file), "--out", str(tmp_path / "out")])
    assert why in capsys.readouterr().err
