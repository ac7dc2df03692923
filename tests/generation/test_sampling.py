"""Each sampling setting equals a slow reference, and samples follow the distribution of the softmax."""

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
fractions = st.floats(0.01, 0.99)


def softmax(logits):
    top = max(logits)
    parts = [math.exp(x - top) for x in logits]
    return [part / sum(parts) for part in parts]


def unfiltered_ids(logits):
    assert logits.shape[0] == 1
    return {i for i, x in enumerate(logits[0].tolist()) if x > -math.inf}


def take_until(p, order, probabilities):
    """The first ids of `order` whose total probability reaches p, and whether p is reached within rounding error."""
    selected_ids, total, is_close = set(), 0.0, False
    for i in order:
        if total >= p:
            break
        selected_ids.add(i)
        total += probabilities[i]
        is_close |= abs(total - p) < 1e-9
    return selected_ids, is_close


def tensor(row):
    return torch.tensor([row], dtype=torch.float64)


@given(rows, st.integers(1, 15))
def test_top_k_keeps_the_k_most_probable(row, k):
    most_probable = sorted(range(len(row)), key=lambda i: -row[i])[:k]
    assert unfiltered_ids(keep_top_k(tensor(row), k)) == set(most_probable)


def test_top_k_keeps_all_ties_with_the_kth():
    assert unfiltered_ids(keep_top_k(tensor([1.0, 2.0, 1.0, 0.0]), 2)) == {0, 1, 2}


@given(rows, fractions)
def test_top_p_keeps_the_smallest_set_that_reaches_p(row, p):
    probabilities = softmax(row)
    expected, is_close = take_until(p, sorted(range(len(row)), key=lambda i: -row[i]), probabilities)
    assert is_close or unfiltered_ids(keep_top_p(tensor(row), p)) == expected


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 9.0])
@pytest.mark.parametrize("p", [0.001, 0.5, 0.9, 0.9999, 1 - 1e-7])
def test_top_p_equals_sorting_the_full_vocabulary(spread, p):
    """The kept probabilities are compared, because ties may be resolved differently."""
    logits = torch.randn(3, 5003, generator=torch.Generator().manual_seed(1)) * spread
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered >= p)
    expected = logits.masked_fill(beyond, float("-inf"))
    assert torch.equal(keep_top_p(logits, p).sort().values, expected.sort().values)


def test_top_p_includes_the_token_that_reaches_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert unfiltered_ids(keep_top_p(logits, 0.5)) == {0}
    assert unfiltered_ids(keep_top_p(logits, 0.501)) == {0, 1}
    assert unfiltered_ids(keep_top_p(logits, 1e-9)) == {0}


@given(rows, fractions)
def test_min_p_keeps_tokens_near_the_most_probable(row, min_p):
    probabilities = softmax(row)
    expected = {i for i, p in enumerate(probabilities) if p >= min_p * max(probabilities)}
    is_close = any(abs(p - min_p * max(probabilities)) < 1e-9 for p in probabilities)
    assert is_close or unfiltered_ids(keep_min_p(tensor(row), min_p)) == expected


@given(rows, fractions)
def test_typical_keeps_the_smallest_set_nearest_to_the_entropy(row, p):
    probabilities = softmax(row)
    entropy = -sum(q * math.log(q) for q in probabilities)
    distance = [abs(-math.log(q) - entropy) for q in probabilities]
    expected, is_close = take_until(p, sorted(range(len(row)), key=lambda i: distance[i]), probabilities)
    is_close |= len({round(d, 9) for d in distance}) < len(distance)
    assert is_close or unfiltered_ids(keep_typical(tensor(row), p)) == expected


def test_typical_can_drop_the_most_probable_token():
    """In a nearly uniform distribution, the surprisal of a single more probable token is far below the entropy."""
    logits = torch.tensor([[0.3, *[0.07] * 10]]).log()
    assert 0 not in unfiltered_ids(keep_typical(logits, 0.3))


@pytest.mark.parametrize(("keep", "neutral_setting"), [(keep_top_p, 1.0), (keep_typical, 1.0), (keep_min_p, 0.0)])
def test_a_disabled_filter_changes_nothing(keep, neutral_setting):
    logits = torch.randn(3, 5003, generator=torch.Generator().manual_seed(1)) * 9
    assert torch.equal(keep(logits, neutral_setting), logits)


def test_filtered_tokens_stay_filtered_through_other_filters():
    filtered = float("-inf")
    logits = torch.tensor([[1.0, filtered, 0.5, filtered, 0.0, -0.5]])
    for keep, setting in ((keep_top_k, 5), (keep_top_p, 0.999999), (keep_min_p, 1e-9), (keep_typical, 0.999999)):
        assert unfiltered_ids(keep(logits, setting)) == {0, 2, 4, 5}


@given(rows, st.floats(0.1, 5), st.data())
def test_the_repetition_penalty_lowers_positive_and_negative_logits(row, penalty, data):
    seen_mask = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    got = apply_repetition_penalty(tensor(row), torch.tensor([seen_mask]), penalty)[0].tolist()
    expected = [
        (x / penalty if x > 0 else x * penalty) if is_seen else x for x, is_seen in zip(row, seen_mask, strict=True)
    ]
    assert got == pytest.approx(expected)


@given(rows, st.floats(0.05, 20))
def test_temperature_is_a_power_of_the_probabilities(row, temperature):
    powers = [p ** (1 / temperature) for p in softmax(row)]
    expected = [p / sum(powers) for p in powers]
    assert apply_temperature(tensor(row), temperature).softmax(-1)[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-40, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_temperature_near_zero_keeps_the_most_probable_without_nan(temperature, dtype):
    logits = torch.tensor([[3.0, 900.0, -900.0, 890.0]], dtype=dtype)
    assert process_logits(logits, SamplingConfig(temperature=temperature)).softmax(-1).tolist() == [[0, 1, 0, 0]]


def test_a_huge_temperature_gives_a_uniform_distribution():
    logits = torch.tensor([[3.0, 900.0, -900.0, 7.0]])
    assert process_logits(logits, SamplingConfig(temperature=1e300)).softmax(-1).tolist() == [[0.25] * 4]


def test_the_settings_apply_in_order():
    """Repetition penalty, temperature, top-k, top-p."""
    row, seen_mask = [2.0, 1.9, 1.0, -3.0], [True, False, False, False]
    config = SamplingConfig(repetition_penalty=4.0, temperature=0.5, top_k=2, top_p=0.9)
    got = process_logits(tensor(row), config, torch.tensor([seen_mask])).softmax(-1)[0].tolist()
    # 2.0 / 4 = 0.5, so 1.9 and 1.0 are the two most probable. Divided by 0.5, they are 3.8 and 2.0: 0.858 and 0.142.
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
    ids=["default", "sharper-top-k", "flatter-top-p-penalized"],
)
def test_a_million_samples_have_the_frequencies_of_the_softmax(config):
    n = 1_000_000
    logits = torch.tensor([[0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9]])
    seen_mask = torch.tensor([[True, False, True, False, False, False, False]])
    probabilities = process_logits(logits, config, seen_mask).softmax(-1)[0].double()
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ids = choose_next_ids(logits.expand(n, -1), config, seen_mask=seen_mask.expand(n, -1), uniform=uniform)
    counts = ids.bincount(minlength=7).tolist()
    open_ids = [i for i, p in enumerate(probabilities.tolist()) if p > 0]
    assert sum(counts[i] for i in open_ids) == n, "a filtered token was sampled"
    # 99.9 % of chi-square at 6 degrees of freedom is below 22.5, and even lower for fewer degrees.
    assert chi_square([counts[i] for i in open_ids], probabilities[open_ids].tolist(), n) < 22.5


def test_the_chi_square_test_can_fail():
    counts = [250_700, 249_300, 250_000, 250_000]
    assert chi_square(counts, [0.25] * 4, 1_000_000) < 22.5
    assert chi_square([253_000, 247_000, 250_000, 250_000], [0.25] * 4, 1_000_000) > 22.5


@given(rows, st.floats(0, 1, exclude_max=True))
def test_a_sample_is_where_the_cumulative_probability_exceeds_the_uniform_number(row, uniform):
    total, expected, is_close = 0.0, None, False
    for i, p in enumerate(softmax(row)):
        total += p
        is_close |= abs(total - uniform) < 1e-9
        if expected is None and total > uniform:
            expected = i
    got = int(sample_inverse_cdf(tensor(row), torch.tensor([uniform], dtype=torch.float64)))
    assert is_close or got == expected


def test_extreme_uniform_numbers_never_select_filtered_tokens():
    filtered = float("-inf")
    logits = torch.tensor([[filtered, 0.0, filtered, 1.0, filtered]])
    for uniform, expected in ((0.0, 1), (1 - 2**-53, 3)):
        assert sample_inverse_cdf(logits, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_each_row_is_sampled_with_its_own_uniform_number():
    logits = torch.zeros(3, 4)
    assert sample_inverse_cdf(logits, torch.tensor([0.1, 0.6, 0.9])).tolist() == [0, 2, 3]


@pytest.mark.parametrize("uniform", [0.0, 0.999])
def test_temperature_0_selects_the_first_maximum_for_any_uniform_number(uniform):
    logits, config = torch.tensor([[0.0, 2.0, 2.0, 1.0]]), SamplingConfig(temperature=0)
    assert choose_next_ids(logits, config, seen_mask=None, uniform=torch.tensor([uniform])).tolist() == [1]
    assert process_logits(logits, config).softmax(-1).tolist() == [[0, 1, 0, 0]]


def test_greedy_decoding_applies_the_repetition_penalty():
    logits, seen_mask = torch.tensor([[2.0, 1.5]]), torch.tensor([[True, False]])
    config = SamplingConfig(temperature=0, repetition_penalty=2.0)
    assert choose_next_ids(logits, config, seen_mask=seen_mask, uniform=torch.zeros(1)).tolist() == [1]


def test_log_probabilities_are_those_of_the_softmax():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2)) * 5
    ids = torch.tensor([10, 0, 4])
    expected = logits.log_softmax(-1)[torch.arange(3), ids]
    torch.testing.assert_close(gather_log_probabilities(logits, ids), expected)


@given(
    vocab_size=st.integers(MIN_ARGMAX_BLOCKS * ARGMAX_BLOCK - 1, (MIN_ARGMAX_BLOCKS + 1) * ARGMAX_BLOCK + 1),
    seed=st.integers(0, 99),
)
def test_argmax_by_blocks_equals_argmax(vocab_size, seed):
    # With few distinct values, the maximum occurs many times. Row 1 has a unique maximum at the very end.
    logits = torch.randint(-3, 3, (3, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    logits[1, -1], logits[2, seed] = 7.0, float("nan")
    assert torch.equal(argmax_by_blocks(logits), logits.argmax(-1))
