"""Systems are scored identically, whether they are run folders or files with translations."""

import json

import pytest

from benchmarks.translators import (
    System,
    TrainingStats,
    load_system,
    main,
    read_training_stats,
    save_system,
    score_systems,
)
from qkv.config import RNNConfig
from qkv.models import RNNSeq2Seq
from qkv.tasks import Translator
from tests.tasks.small_translator import reverse_words, save_translator, train_word_tokenizer

SOURCES = [
    "uno dos tres cuatro",
    "cinco seis siete ocho nueve",
    "diez uno dos tres cuatro cinco",
    "seis siete ocho",
    "nueve diez uno dos",
    "tres tres cuatro uno siete",
    "ocho",
]
PAIRS = [(source, reverse_words(source)) for source in SOURCES]
RIGHT = [target for _, target in PAIRS]
WORSE = [f"{target.rpartition(' ')[0]} cien" for target in RIGHT]


def make_system(name, greedy, beam, **stats):
    translations = {"greedy": greedy, "beam5": beam}
    return System(name=name, translations=translations, stats=TrainingStats(parameters=13, **stats))


def build_untrained_translator():
    tokenizer = train_word_tokenizer()
    config = RNNConfig(vocab_size=tokenizer.vocab_size, context_length=37, d_model=6)
    return Translator(RNNSeq2Seq(config, seed=3).eval(), tokenizer)


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return path


def test_a_saved_system_is_loaded_unchanged(tmp_path):
    system = make_system("split, 7+3", WORSE, RIGHT, seconds=17.5, tokens_per_second=1234.5)
    save_system(system, tmp_path)
    assert load_system("split, 7+3", tmp_path / "split-7-3.json") == system


def test_an_empty_translation_at_the_end_is_kept(tmp_path):
    system = make_system("blank", [*WORSE[:-1], ""], ["", *RIGHT[1:]])
    save_system(system, tmp_path)
    assert load_system("blank", tmp_path / "blank.json") == system


def test_training_stats_are_those_of_the_last_step(tmp_path):
    entries = [
        {"step": 1, "tokens": 7, "seconds": 1.0},
        {"step": 2, "tokens": 33, "seconds": 3.0},
        {"step": 2, "validation_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read_training_stats(tmp_path) == {"seconds": 3.0, "tokens_per_second": 11.0}
    assert read_training_stats(tmp_path / "other") == {}


def test_search_methods_are_scored_separately_and_only_the_peer_has_no_p_value():
    ours, peer = score_systems(
        [make_system("ours", WORSE, RIGHT), make_system("peer", WORSE, WORSE)],
        PAIRS,
        peer="peer",
        n_bootstrap_samples=101,
    )
    assert ours.scores["beam5"]["BLEU"].score == pytest.approx(100)
    assert ours.scores["greedy"]["BLEU"].score < 90
    assert peer.scores["beam5"]["BLEU"].p_value is None
    assert ours.scores["beam5"]["BLEU"].p_value < 0.05
    assert ours.scores["greedy"]["BLEU"].p_value == 1.0
    assert [row["sentences"] for row in ours.bleu_by_source_length] == [6, 1]


def test_too_few_translations_are_an_error():
    with pytest.raises(Exception, match=r"short, beam5: 6\b.*\b7\b"):
        score_systems([make_system("short", RIGHT, RIGHT[1:])], PAIRS, peer=None, n_bootstrap_samples=11)


def test_a_run_folder_and_files_are_compared_in_one_table_and_one_plot(tmp_path, pairs_file, capsys):
    save_system(make_system("peer", WORSE, RIGHT, tokens_per_second=2345.0), tmp_path)
    model = build_untrained_translator()
    out = tmp_path / "out"
    systems = [f"our model={save_translator(model, tmp_path / 'model')}", f"peer={tmp_path / 'peer.json'}"]
    assert main([*systems, "--pairs", str(pairs_file), "--out", str(out), "--peer", "peer", "--draws", "101"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| our", "| peer"))]
    ours, peer = (line.strip("| ").split(" | ") for line in lines)
    n_parameters = sum(weights.numel() for weights in model.model.parameters())
    assert ours[:4] == ["our model", f"{n_parameters:,}", "–", "–"]
    assert [peer[0], peer[3], peer[8]] == ["peer", "2,345", "–"]
    assert peer[6].startswith("100.00 [")
    saved = load_system("our model", out / "our-model.json").translations
    assert saved == {"greedy": model.translate(SOURCES, beam=1), "beam5": model.translate(SOURCES, beam=5)}
    assert (out / "translators.png").stat().st_size > 9_000
    _, figures = json.loads((out / "translators.json").read_text())
    assert figures["beam5"]["BLEU"]["score"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["no-separator"], "no-separator: "),
        (["a=gone"], "a=gone: "),
        (["a=x", "a=y"], "expected 2 different names, got 1"),
        (["a=x", "--peer", "b"], "--peer b: "),
    ],
)
def test_invalid_arguments_are_an_error(tmp_path, pairs_file, capsys, arguments, values):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--pairs", str(pairs_file), "--out", str(tmp_path / "out")])
    assert values in capsys.readouterr().err
