"""BLEU and chrF: sacrebleu's own numbers, with interval, comparison and buckets."""

import pytest
import sacrebleu

from qkv.errors import InputError
from qkv.text.translation_metrics import bleu_by_source_length, compare_systems, score_translations, scores_to_dict

REFERENCES = ["The cat sat on the mat.", "It was raining all day long.", "Go!", "Nobody knew where he had gone."] * 5
GOOD = ["The cat sat on the mat.", "It rained all day long.", "Go!", "Nobody knew where he went."] * 5
BAD = ["A cat is on a mat.", "It rained today.", "Go away!", "No one knew it."] * 5


def test_scores_are_sacrebleus():
    found = score_translations(GOOD, REFERENCES, n_bootstrap_samples=50)
    assert found["BLEU"].score == pytest.approx(sacrebleu.corpus_bleu(GOOD, [REFERENCES]).score)
    assert found["chrF"].score == pytest.approx(sacrebleu.corpus_chrf(GOOD, [REFERENCES]).score)
    assert found["BLEU"].low < found["BLEU"].score < found["BLEU"].high
    assert "case:mixed" in found["BLEU"].signature
    assert "bs:50" in found["BLEU"].signature
    assert "low" not in scores_to_dict(score_translations(GOOD, REFERENCES, n_bootstrap_samples=0))["BLEU"]


def test_a_worse_system_is_told_from_a_better_one_and_an_equal_one_is_not():
    found = compare_systems({"good": GOOD, "bad": BAD, "same": list(GOOD)}, REFERENCES, n_bootstrap_samples=200)
    assert found["good"]["BLEU"].p_value is None
    assert found["bad"]["BLEU"].p_value < 0.05
    assert found["same"]["BLEU"].p_value > 0.3
    assert found["bad"]["BLEU"].score < found["good"]["BLEU"].score


def test_buckets_hold_every_sentence_once():
    table = bleu_by_source_length(REFERENCES, GOOD, REFERENCES)
    assert [(row["words"], row["sentences"]) for row in table] == [("1–5", 5), ("6–10", 15)]


def test_unequal_numbers_are_refused():
    with pytest.raises(InputError, match="there are 1 translations for 20 references"):
        score_translations(["a"], REFERENCES)
    with pytest.raises(InputError, match="there are 20 translations for 1 sources"):
        bleu_by_source_length(["a"], GOOD, REFERENCES)
