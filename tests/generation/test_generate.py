"""Cached generation in ragged batches equals the reference implementation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import SamplingConfig
from qkv.errors import ContextLengthError, InputError, WeightsError
from qkv.generation import (
    FinishReason,
    generate,
    generate_tokens,
    generate_without_cache,
    top_raw_and_processed_candidates,
)
from tests.agreement.model_strategies import build_random_model, gpts
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, score_with_full_pass, small_gpt

ids = st.integers(0, VOCAB_SIZE - 1)
prompts = st.lists(ids, min_size=1, max_size=7)
samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    top_k=st.sampled_from((None, 7)),
    top_p=st.sampled_from((None, 0.9)),
    min_p=st.sampled_from((None, 0.05)),
    typical_p=st.sampled_from((None, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.7)),
    seed=st.integers(0, 99),
)


@settings(max_examples=30)
@given(gpts(), st.integers(0, 99), prompts, samplings)
def test_cached_generation_equals_the_reference(config, seed, prompt, sampling):
    model = build_random_model(config, seed)
    stops = frozenset({3})
    (fast,) = generate(model, [prompt], max_new=8, sampling=sampling, stop_ids=stops)
    reference = generate_without_cache(model, prompt, max_new=8, sampling=sampling, stop_ids=stops)
    assert fast.new_ids == reference.new_ids
    assert fast.finish_reason == reference.finish_reason
    assert fast.log_probabilities == pytest.approx(reference.log_probabilities, abs=1e-7)


@settings(max_examples=20)
@given(gpts(), st.integers(0, 99), st.lists(prompts, min_size=1, max_size=5), samplings, st.sets(ids, max_size=4))
def test_a_ragged_batch_equals_each_row_separately(config, seed, all_prompts, sampling, stops):
    """Rows finish at different steps because of stop ids, without affecting the others."""
    model = build_random_model(config, seed)
    batched = generate(model, all_prompts, max_new=7, sampling=sampling, stop_ids=frozenset(stops))
    for row, prompt in enumerate(all_prompts):
        row_sampling = sampling.replace(seed=sampling.seed + row)
        (separate,) = generate(model, [prompt], max_new=7, sampling=row_sampling, stop_ids=frozenset(stops))
        assert (batched[row].new_ids, batched[row].finish_reason) == (separate.new_ids, separate.finish_reason)
        assert batched[row].log_probabilities == pytest.approx(separate.log_probabilities, abs=1e-7)


@settings(max_examples=30)
@given(prompts, samplings)
def test_log_probabilities_are_those_of_a_full_pass(prompt, sampling):
    model = small_gpt()
    (sequence,) = generate(model, [prompt], max_new=13, sampling=sampling)
    assert sequence.log_probabilities == pytest.approx(score_with_full_pass(model, prompt, sequence.new_ids), abs=1e-9)


def test_the_seed_determines_the_output_and_each_row_has_its_own():
    model = small_gpt()

    def generate_with_seed(seed):
        sampling = SamplingConfig(seed=seed)
        return [sequence.new_ids for sequence in generate(model, [[1, 2]] * 3, max_new=17, sampling=sampling)]

    assert generate_with_seed(5) == generate_with_seed(5)
    assert generate_with_seed(5)[1:] == generate_with_seed(6)[:2]
    assert len({tuple(new_ids) for new_ids in generate_with_seed(5)}) == 3


def test_the_global_random_state_does_not_change():
    model = small_gpt()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generate(model, [[1]], max_new=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stop_id_ends_a_row_and_is_its_last_token():
    model = small_gpt()
    greedy = SamplingConfig(temperature=0, repetition_penalty=3.0)
    (free,) = generate(model, [[5, 6]], max_new=9, sampling=greedy)
    stop = free.new_ids[4]
    first = free.new_ids.index(stop)
    (sequence,) = generate(model, [[5, 6]], max_new=9, sampling=greedy, stop_ids=frozenset({stop}))
    assert sequence.new_ids == free.new_ids[: first + 1]
    assert sequence.finish_reason is FinishReason.STOP
    assert free.finish_reason is FinishReason.LENGTH


def test_the_caller_can_stop_a_row():
    counts = {0: 0, 1: 0}
    for step in generate_tokens(small_gpt(), [[1, 2, 3], [4]], max_new=7):
        counts[step.row] += 1
        if step.row == 0 and counts[0] == 2:
            step.sequence.finish_reason = FinishReason.STOP
    assert counts == {0: 2, 1: 7}


def test_a_prompt_that_fills_the_context_gets_one_more_token():
    model = small_gpt()
    prompt = [i % VOCAB_SIZE for i in range(CONTEXT)]
    greedy = SamplingConfig(temperature=0)
    (sequence,) = generate(model, [prompt], max_new=5, sampling=greedy)
    with torch.no_grad():
        assert sequence.new_ids == [int(model(torch.tensor([prompt]))[0, -1].argmax())]
    assert sequence.finish_reason is FinishReason.CONTEXT
    assert generate_without_cache(model, prompt, max_new=5, sampling=greedy).new_ids == sequence.new_ids


def test_generation_stops_when_the_context_is_full():
    sequences = generate(small_gpt(), [[1] * (CONTEXT - 3), [1] * 2], max_new=11)
    assert [(len(sequence.new_ids), sequence.finish_reason) for sequence in sequences] == [
        (4, FinishReason.CONTEXT),
        (11, FinishReason.LENGTH),
    ]


def test_invalid_input_is_rejected_with_the_actual_values():
    model = small_gpt()
    with pytest.raises(ContextLengthError, match=r"prompt 1 .*\b30\b.*context_length.*\b29\b"):
        generate(model, [[1], [1] * 30], max_new=5)
    with pytest.raises(InputError, match=r"prompt 1 .*\b0\b"):
        generate(model, [[1], []], max_new=5)
    with pytest.raises(InputError, match=r"max_new.*\b0\b"):
        generate(model, [[1]], max_new=0)
    with pytest.raises(InputError, match=r"\b1 prompt.*\b0\b"):
        generate(model, [], max_new=5)
    with pytest.raises(InputError, match=r"\b23\b.*\b22\b"):
        generate(model, [[23]], max_new=5)


def test_nan_logits_are_rejected():
    model = small_gpt()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"NaN.*\b0\b"):
        generate(model, [[1]], max_new=5)


def test_generation_needs_no_gradients_and_leaves_them_enabled():
    model = small_gpt()
    step = next(generate_tokens(model, [[1]], max_new=2))
    assert not step.logits.requires_grad
    model(torch.tensor([[1, 2]])).sum().backward()


@settings(max_examples=30)
@given(prompts, samplings)
def test_candidates_include_the_most_probable_and_the_chosen_token(prompt, sampling):
    model = small_gpt()
    for step in generate_tokens(model, [prompt], max_new=3, sampling=sampling):
        candidates = top_raw_and_processed_candidates(step, sampling, n=4)
        before = step.logits.softmax(-1)[0]
        assert set(before.topk(4).indices.tolist()) <= {candidate.id for candidate in candidates}
        assert [candidate.id for candidate in candidates if candidate.is_chosen] == [step.id]
        assert [candidate.probability for candidate in candidates] == sorted(
            (candidate.probability for candidate in candidates), reverse=True
        )
        chosen = next(candidate for candidate in candidates if candidate.is_chosen)
        assert chosen.revised > 0
        assert sum(candidate.revised for candidate in candidates) <= 1 + 1e-6
        assert chosen.probability == pytest.approx(float(before[step.id]), abs=1e-6)
        if sampling.temperature == 0:
            assert chosen.revised == 1


def test_candidates_only_penalize_tokens_before_this_step():
    """At the step that first generates an id, this id does not count as repeated."""
    model = small_gpt()
    sampling = SamplingConfig(repetition_penalty=5.0)
    step = next(generate_tokens(model, [[1, 2]], max_new=1, sampling=sampling))
    by_id = {candidate.id: candidate for candidate in top_raw_and_processed_candidates(step, sampling, n=VOCAB_SIZE)}
    raw = step.logits[0].clone()
    for token_id in (1, 2):
        raw[token_id] = raw[token_id] / 5 if raw[token_id] > 0 else raw[token_id] * 5
    assert [by_id[i].revised for i in range(VOCAB_SIZE)] == pytest.approx(raw.softmax(-1).tolist(), abs=1e-6)
