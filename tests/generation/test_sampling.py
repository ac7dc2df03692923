"""Each setting against a slow reference, and draws against the softmax they come from."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import SamplingConfig
from qkv.generation.sampling import (
    ARGMAX_BLOCK,
    MIN_ARGMAX_BLOCKS,
    apply_repetition_penalty,
    apply_temperature,
    argmax_by_blocks,
    choose_next_ids,
    gather_log_probabilities,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    process_logits,
    sample_inverse_cdf,
)

logit = st.floats(-9, 9).map(lambda x: round(x, 3))
rows = st.lists(logit, min_size=1, max_size=13, unique=True)
shares = st.floats(0.01, 0.99)


def softmax(logits):
    top = max(logits)
    parts = [math.exp(x - top) for x in logits]
    return [part / sum(parts) for part in parts]


def kept(logits):
    assert logits.shape[0] == 1
    return {i for i, x in enumerate(logits[0].tolist()) if x > -math.inf}


def until(p, order, probabilities):
    """The first of `order` whose probabilities reach p together; and whether p is met too closely to call."""
    chosen, total, is_close = set(), 0.0, False
    for i in order:
        if total >= p:
            break
        chosen.add(i)
        total += probabilities[i]
        is_close |= abs(total - p) < 1e-9
    return chosen, is_close


def tensor(row):
    return torch.tensor([row], dtype=torch.float64)


@given(rows, st.integers(1, 15))
def test_top_k_keeps_the_k_likeliest(row, k):
    likeliest = sorted(range(len(row)), key=lambda i: -row[i])[:k]
    assert kept(keep_top_k(tensor(row), k)) == set(likeliest)


def test_top_k_keeps_all_that_are_as_likely_as_the_kth():
    assert kept(keep_top_k(tensor([1.0, 2.0, 1.0, 0.0]), 2)) == {0, 1, 2}


@given(rows, shares)
def test_top_p_keeps_the_fewest_that_reach_p(row, p):
    probabilities = softmax(row)
    expected, is_close = until(p, sorted(range(len(row)), key=lambda i: -row[i]), probabilities)
    assert is_close or kept(keep_top_p(tensor(row), p)) == expected


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 9.0])
@pytest.mark.parametrize("p", [0.001, 0.5, 0.9, 0.9999, 1 - 1e-7])
def test_top_p_is_the_same_as_by_sorting_everything(spread, p):
    """Ties aside: what is kept has the same probabilities."""
    logits = torch.randn(3, 5003, generator=torch.Generator().manual_seed(1)) * spread
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered >= p)
    expected = logits.masked_fill(beyond, float("-inf"))
    assert torch.equal(keep_top_p(logits, p).sort().values, expected.sort().values)


def test_top_p_counts_the_one_that_reaches_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert kept(keep_top_p(logits, 0.5)) == {0}
    assert kept(keep_top_p(logits, 0.501)) == {0, 1}
    assert kept(keep_top_p(logits, 1e-9)) == {0}


@given(rows, shares)
def test_min_p_keeps_those_near_the_likeliest(row, share):
    probabilities = softmax(row)
    expected = {i for i, p in enumerate(probabilities) if p >= share * max(probabilities)}
    is_close = any(abs(p - share * max(probabilities)) < 1e-9 for p in probabilities)
    assert is_close or kept(keep_min_p(tensor(row), share)) == expected


@given(rows, shares)
def test_typical_keeps_the_fewest_nearest_to_the_expected_surprise(row, p):
    probabilities = softmax(row)
    entropy = -sum(q * math.log(q) for q in probabilities)
    distance = [abs(-math.log(q) - entropy) for q in probabilities]
    expected, is_close = until(p, sorted(range(len(row)), key=lambda i: distance[i]), probabilities)
    is_close |= len({round(d, 9) for d in distance}) < len(distance)
    assert is_close or kept(keep_typical(tensor(row), p)) == expected


def test_typical_leaves_out_the_likeliest_where_it_is_not_typical():
    """Nearly even but for one favourite: the favourite is less surprising than expected."""
    logits = torch.tensor([[0.3, *[0.07] * 10]]).log()
    assert 0 not in kept(keep_typical(logits, 0.3))


@pytest.mark.parametrize(("keep", "all_of_it"), [(keep_top_p, 1.0), (keep_typical, 1.0), (keep_min_p, 0.0)])
def test_a_filter_that_is_open_changes_nothing(keep, all_of_it):
    logits = torch.randn(3, 5003, generator=torch.Generator().manual_seed(1)) * 9
    assert torch.equal(keep(logits, all_of_it), logits)


def test_what_is_out_stays_out_through_every_other_filter():
    out = float("-inf")
    logits = torch.tensor([[1.0, out, 0.5, out, 0.0, -0.5]])
    for keep, setting in ((keep_top_k, 5), (keep_top_p, 0.999999), (keep_min_p, 1e-9), (keep_typical, 0.999999)):
        assert kept(keep(logits, setting)) == {0, 2, 4, 5}


@given(rows, st.floats(0.1, 5), st.data())
def test_repetition_is_penalised_whichever_sign_a_logit_has(row, penalty, data):
    said = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    got = apply_repetition_penalty(tensor(row), torch.tensor([said]), penalty)[0].tolist()
    expected = [(x / penalty if x > 0 else x * penalty) if is_said else x for x, is_said in zip(row, said, strict=True)]
    assert got == pytest.approx(expected)


@given(rows, st.floats(0.05, 20))
def test_temperature_is_a_power_of_the_probabilities(row, temperature):
    powers = [p ** (1 / temperature) for p in softmax(row)]
    expected = [p / sum(powers) for p in powers]
    assert apply_temperature(tensor(row), temperature).softmax(-1)[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-40, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_temperature_near_zero_leaves_the_likeliest_and_no_nan(temperature, dtype):
    logits = torch.tensor([[3.0, 900.0, -900.0, 890.0]], dtype=dtype)
    assert process_logits(logits, SamplingConfig(temperature=temperature)).softmax(-1).tolist() == [[0, 1, 0, 0]]


def test_a_huge_temperature_makes_all_alike():
    logits = torch.tensor([[3.0, 900.0, -900.0, 7.0]])
    assert process_logits(logits, SamplingConfig(temperature=1e300)).softmax(-1).tolist() == [[0.25] * 4]


def test_the_settings_apply_in_their_order():
    """Repetition before temperature before top-k before top-p."""
    row, said = [2.0, 1.9, 1.0, -3.0], [True, False, False, False]
    config = SamplingConfig(repetition_penalty=4.0, temperature=0.5, top_k=2, top_p=0.9)
    got = process_logits(tensor(row), config, torch.tensor([said])).softmax(-1)[0].tolist()
    # 2.0 / 4 = 0.5, so 1.9 and 1.0 are the two likeliest; over 0.5 they are 3.8 and 2.0: 0.858 and 0.142.
    assert got == pytest.approx([0, *softmax([3.8, 2.0]), 0])


def chi_square(counts, probabilities, n):
    return sum((count - n * p) ** 2 / (n * p) for count, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.7, top_k=5),
        SamplingConfig(temperature=1.3, top_p=0.8, repetition_penalty=1.5),
    ],
    ids=["plain", "sharper-top-k", "flatter-top-p-penalised"],
)
def test_a_million_draws_have_the_frequencies_of_the_softmax(config):
    n = 1_000_000
    logits = torch.tensor([[0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9]])
    said = torch.tensor([[True, False, True, False, False, False, False]])
    probabilities = process_logits(logits, config, said).softmax(-1)[0].double()
    chance = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ids = choose_next_ids(logits.expand(n, -1), config, seen_mask=said.expand(n, -1), uniform=chance)
    counts = ids.bincount(minlength=7).tolist()
    open_ids = [i for i, p in enumerate(probabilities.tolist()) if p > 0]
    assert sum(counts[i] for i in open_ids) == n, "nothing that was filtered out is ever drawn"
    # 99.9 % of chi-square at 6 degrees of freedom lies below 22.5; at fewer it is less still.
    assert chi_square([counts[i] for i in open_ids], probabilities[open_ids].tolist(), n) < 22.5


def test_the_chi_square_test_can_fail():
    counts = [250_700, 249_300, 250_000, 250_000]
    assert chi_square(counts, [0.25] * 4, 1_000_000) < 22.5
    assert chi_square([253_000, 247_000, 250_000, 250_000], [0.25] * 4, 1_000_000) > 22.5


@given(rows, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_where_the_probabilities_added_up_pass_the_chance(row, chance):
    total, expected, is_close = 0.0, None, False
    for i, p in enumerate(softmax(row)):
        total += p
        is_close |= abs(total - chance) < 1e-9
        if expected is None and total > chance:
            expected = i
    got = int(sample_inverse_cdf(tensor(row), torch.tensor([chance], dtype=torch.float64)))
    assert is_close or got == expected


def test_the_ends_of_chance_never_reach_what_is_out():
    out = float("-inf")
    logits = torch.tensor([[out, 0.0, out, 1.0, out]])
    for chance, expected in ((0.0, 1), (1 - 2**-53, 3)):
        assert sample_inverse_cdf(logits, torch.tensor([chance], dtype=torch.float64)).tolist() == [expected]


def test_rows_draw_each_with_their_own_chance():
    logits = torch.zeros(3, 4)
    assert sample_inverse_cdf(logits, torch.tensor([0.1, 0.6, 0.9])).tolist() == [0, 2, 3]


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_temperature_0_takes_the_first_of_the_likeliest_whatever_the_chance(chance):
    logits, config = torch.tensor([[0.0, 2.0, 2.0, 1.0]]), SamplingConfig(temperature=0)
    assert choose_next_ids(logits, config, seen_mask=None, uniform=torch.tensor([chance])).tolist() == [1]
    assert process_logits(logits, config).softmax(-1).tolist() == [[0, 1, 0, 0]]


def test_greedy_heeds_the_repetition_penalty():
    logits, said = torch.tensor([[2.0, 1.5]]), torch.tensor([[True, False]])
    config = SamplingConfig(temperature=0, repetition_penalty=2.0)
    assert choose_next_ids(logits, config, seen_mask=said, uniform=torch.zeros(1)).tolist() == [1]


def test_log_probabilities_are_those_of_the_softmax():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2)) * 5
    ids = torch.tensor([10, 0, 4])
    expected = logits.log_softmax(-1)[torch.arange(3), ids]
    torch.testing.assert_close(gather_log_probabilities(logits, ids), expected)


@given(
    n_words=st.integers(MIN_ARGMAX_BLOCKS * ARGMAX_BLOCK - 1, (MIN_ARGMAX_BLOCKS + 1) * ARGMAX_BLOCK + 1),
    seed=st.integers(0, 99),
)
def test_the_likeliest_of_many_is_the_first_of_the_greatest(n_words, seed):
    # Few different numbers, so that the greatest stands in many places, and in a row of its own at the very end.
    logits = torch.randint(-3, 3, (3, n_words), generator=torch.Generator().manual_seed(seed)).float()
    logits[1, -1], logits[2, seed] = 7.0, float("nan")
    assert torch.equal(argmax_by_blocks(logits), logits.argmax(-1))
