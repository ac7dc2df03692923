"""Generation by the cache, in ragged batches, is what the plain road says it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import SamplingConfig
from qkv.errors import ContextLengthError, InputError, WeightsError
from qkv.generation import FinishReason, generate, generate_reference, generate_steps, top_candidates
from tests.agreement.families import gpts, shaken
from tests.generation.small_models import CONTEXT, VOCABULARY, rescored, small_gpt

ids = st.integers(0, VOCABULARY - 1)
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
def test_cached_equals_recomputing_everything(config, seed, prompt, sampling):
    model = shaken(config, seed)
    stops = frozenset({3})
    (fast,) = generate(model, [prompt], max_new=8, sampling=sampling, stop_ids=stops)
    plain = generate_reference(model, prompt, max_new=8, sampling=sampling, stop_ids=stops)
    assert fast.new_ids == plain.new_ids
    assert fast.finish_reason == plain.finish_reason
    assert fast.log_probabilities == pytest.approx(plain.log_probabilities, abs=1e-7)


@settings(max_examples=20)
@given(gpts(), st.integers(0, 99), st.lists(prompts, min_size=1, max_size=5), samplings, st.sets(ids, max_size=4))
def test_a_ragged_batch_equals_its_rows_alone(config, seed, all_prompts, sampling, stops):
    """Rows end at different steps, by stop ids, and the others go on undisturbed."""
    model = shaken(config, seed)
    together = generate(model, all_prompts, max_new=7, sampling=sampling, stop_ids=frozenset(stops))
    for row, prompt in enumerate(all_prompts):
        own = sampling.replace(seed=sampling.seed + row)
        (alone,) = generate(model, [prompt], max_new=7, sampling=own, stop_ids=frozenset(stops))
        assert (together[row].new_ids, together[row].finish_reason) == (alone.new_ids, alone.finish_reason)
        assert together[row].log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-7)


@settings(max_examples=30)
@given(prompts, samplings)
def test_log_probabilities_are_those_of_a_full_pass(prompt, sampling):
    model = small_gpt()
    (text,) = generate(model, [prompt], max_new=13, sampling=sampling)
    assert text.log_probabilities == pytest.approx(rescored(model, prompt, text.new_ids), abs=1e-9)


def test_the_seed_decides_and_rows_have_their_own():
    model = small_gpt()

    def said(seed):
        sampling = SamplingConfig(seed=seed)
        return [text.new_ids for text in generate(model, [[1, 2]] * 3, max_new=17, sampling=sampling)]

    assert said(5) == said(5)
    assert said(5)[1:] == said(6)[:2]
    assert len({tuple(new) for new in said(5)}) == 3


def test_torchs_own_chance_is_not_touched():
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
    (text,) = generate(model, [[5, 6]], max_new=9, sampling=greedy, stop_ids=frozenset({stop}))
    assert text.new_ids == free.new_ids[: first + 1]
    assert text.finish_reason is FinishReason.STOP
    assert free.finish_reason is FinishReason.LENGTH


def test_a_reader_may_end_a_row():
    got = {0: 0, 1: 0}
    for step in generate_steps(small_gpt(), [[1, 2, 3], [4]], max_new=7):
        got[step.row] += 1
        if step.row == 0 and got[0] == 2:
            step.sequence.finish_reason = FinishReason.STOP
    assert got == {0: 2, 1: 7}


def test_a_prompt_that_fills_the_context_gets_one_more_token():
    model = small_gpt()
    prompt = [i % VOCABULARY for i in range(CONTEXT)]
    greedy = SamplingConfig(temperature=0)
    (text,) = generate(model, [prompt], max_new=5, sampling=greedy)
    with torch.no_grad():
        assert text.new_ids == [int(model(torch.tensor([prompt]))[0, -1].argmax())]
    assert text.finish_reason is FinishReason.CONTEXT
    assert generate_reference(model, prompt, max_new=5, sampling=greedy).new == text.new_ids


def test_a_text_ends_where_the_context_does():
    texts = generate(small_gpt(), [[1] * (CONTEXT - 3), [1] * 2], max_new=11)
    assert [(len(text.new_ids), text.finish_reason) for text in texts] == [
        (4, FinishReason.CONTEXT),
        (11, FinishReason.LENGTH),
    ]


def test_bad_input_is_one_line_with_both_numbers():
    model = small_gpt()
    with pytest.raises(ContextLengthError, match="prompt 1 has 30 tokens; the model's context_length is 29"):
        generate(model, [[1], [1] * 30], max_new=5)
    with pytest.raises(InputError, match="prompt 1 is empty: 0 tokens, there must be at least 1"):
        generate(model, [[1], []], max_new=5)
    with pytest.raises(InputError, match="0 new tokens were asked for; at least 1"):
        generate(model, [[1]], max_new=0)
    with pytest.raises(InputError, match="0 prompts; at least 1"):
        generate(model, [], max_new=5)
    with pytest.raises(InputError, match="id 23 is outside the vocabulary of 23"):
        generate(model, [[23]], max_new=5)


def test_logits_that_are_no_numbers_are_refused():
    model = small_gpt()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"after 0 new tokens the logits are no numbers \(NaN\)"):
        generate(model, [[1]], max_new=5)


def test_no_gradients_are_kept_and_none_are_needed_afterwards():
    model = small_gpt()
    step = next(generate_steps(model, [[1]], max_new=2))
    assert not step.logits.requires_grad
    model(torch.tensor([[1, 2]])).sum().backward()


@settings(max_examples=30)
@given(prompts, samplings)
def test_candidates_hold_the_best_before_and_after_and_the_chosen_one(prompt, sampling):
    model = small_gpt()
    for step in generate_steps(model, [prompt], max_new=3, sampling=sampling):
        shown = top_candidates(step, sampling, n=4)
        before = step.logits.softmax(-1)[0]
        assert set(before.topk(4).indices.tolist()) <= {one.id for one in shown}
        assert [one.id for one in shown if one.is_chosen] == [step.id]
        assert [one.probability for one in shown] == sorted((one.probability for one in shown), reverse=True)
        chosen = next(one for one in shown if one.is_chosen)
        assert chosen.revised > 0
        assert sum(one.revised for one in shown) <= 1 + 1e-6
        assert chosen.probability == pytest.approx(float(before[step.id]), abs=1e-6)
        if sampling.temperature == 0:
            assert chosen.revised == 1


def test_candidates_know_what_was_said_before_this_step_alone():
    """At the step that first says an id, that id is not yet repeated."""
    model = small_gpt()
    sampling = SamplingConfig(repetition_penalty=5.0)
    step = next(generate_steps(model, [[1, 2]], max_new=1, sampling=sampling))
    shown = {one.id: one for one in top_candidates(step, sampling, n=VOCABULARY)}
    raw = step.logits[0].clone()
    for said in (1, 2):
        raw[said] = raw[said] / 5 if raw[said] > 0 else raw[said] * 5
    assert [shown[i].revised for i in range(VOCABULARY)] == pytest.approx(raw.softmax(-1).tolist(), abs=1e-6)
