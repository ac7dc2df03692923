"""BLEU and chrF with confidence intervals, system comparisons and length buckets."""

import pytest
import sacrebleu

from qkv.errors import InputError
from qkv.text.translation_metrics import (
    bleu_by_source_length,
    compare_with_first_system,
    score_translations,
    scores_to_dict,
)

REFERENCES = ["The cat sat on the mat.", "It was raining all day long.", "Go!", "Nobody knew where he had gone."] * 5
GOOD = ["The cat sat on the mat.", "It rained all day long.", "Go!", "Nobody knew where he went."] * 5
BAD = ["A cat is on a mat.", "It rained today.", "Go away!", "No one knew it."] * 5


def test_scores_equal_those_of_sacrebleu():
    scores = score_translations(GOOD, REFERENCES, n_bootstrap_samples=50)
    assert scores["BLEU"].score == pytest.approx(sacrebleu.corpus_bleu(GOOD, [REFERENCES]).score)
    assert scores["chrF"].score == pytest.approx(sacrebleu.corpus_chrf(GOOD, [REFERENCES]).score)
    assert scores["BLEU"].low < scores["BLEU"].score < scores["BLEU"].high
    assert "case:mixed" in scores["BLEU"].signature
    assert "bs:50" in scores["BLEU"].signature
    assert "low" not in scores_to_dict(score_translations(GOOD, REFERENCES, n_bootstrap_samples=0))["BLEU"]


def test_a_worse_system_differs_significantly_and_an_equal_one_does_not():
    scores = compare_with_first_system(
        {"good": GOOD, "bad": BAD, "same": list(GOOD)}, REFERENCES, n_bootstrap_samples=200
    )
    assert scores["good"]["BLEU"].p_value is None
    assert scores["bad"]["BLEU"].p_value < 0.05
    assert scores["same"]["BLEU"].p_value > 0.3
    assert scores["bad"]["BLEU"].score < scores["good"]["BLEU"].score


def test_length_buckets_contain_each_sentence_once():
    table = bleu_by_source_length(REFERENCES, GOOD, REFERENCES)
    assert [(row["words"], row["sentences"]) for row in table] == [("1–5", 5), ("6–10", 15)]


def test_different_numbers_of_sentences_are_errors():
    with pytest.raises(InputError, match=r"translations \(1\).*references \(20\)"):
        score_translations(["a"], REFERENCES)
    with pytest.raises(InputError, match=r"translations \(20\).*sources \(1\)"):
        bleu_by_source_length(["a"], GOOD, REFERENCES)
