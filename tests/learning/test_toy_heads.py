"""The toy attention heads of lecture A learn their tasks with every seed."""

import pytest
from torch.nn import functional as F

from qkv.lessons import toy_head_5, toy_head_7

SEEDS = (0, 1, 2, 3, 4)
WORDS_5, WORDS_7 = toy_head_5.TOY_WORDS_5, toy_head_7.TOY_WORDS_7


@pytest.mark.parametrize("seed", SEEDS)
def test_five_tokens_the_is_followed_by_man_at_1_and_by_chicken_at_4(seed):
    _, p = toy_head_5.train_head_and_predict(seed)
    assert p[1, WORDS_5.index("man")] >= 0.95
    assert p[4, WORDS_5.index("chicken")] >= 0.95
    assert (p * toy_head_5.target_table()).sum(-1).min() >= 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_seven_tokens_the_is_followed_by_the_order_of_this_person(seed):
    _, p = toy_head_7.train_head_and_predict_on(seed, F.one_hot(toy_head_7.SENTENCE_IDS, len(WORDS_7)).float())
    assert p[0, 3, WORDS_7.index("chicken")] >= 0.95
    assert p[1, 3, WORDS_7.index("beef")] >= 0.95


def test_bigram_inputs_cannot_distinguish_man_from_woman():
    _, p = toy_head_7.train_head_and_predict_on(0, toy_head_7.bigram_distribution_by_position())
    assert p[0, 3, WORDS_7.index("chicken")] == pytest.approx(0.5, abs=0.01)


def test_without_positions_and_mask_both_the_get_the_same_prediction():
    _, p = toy_head_5.train_head_and_predict(0, with_positions=False, causal=False)
    assert p[1].tolist() == pytest.approx(p[4].tolist(), abs=1e-6)


def test_positions_suffice_to_distinguish_the_two_the():
    _, p = toy_head_5.train_head_and_predict(0, causal=False)
    assert p[1, WORDS_5.index("man")] >= 0.95
    assert p[4, WORDS_5.index("chicken")] >= 0.95
