"""Beam search: one beam is greedy, enough beams are brute force, scores are what a full pass says."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import BeamConfig, SamplingConfig, Seq2SeqConfig
from qkv.errors import ContextLengthError, WeightsError
from qkv.generation import (
    FinishReason,
    GPTDecoder,
    LengthLimit,
    Seq2SeqDecoder,
    beam_generate,
    beam_search,
    generate,
)
from tests.agreement.families import shaken
from tests.generation.small_models import CONTEXT, VOCABULARY, rescored, small_gpt

penalties = st.sampled_from((0.0, 0.6, 1.0, 1.4))


@torch.no_grad()
def brute_force(logits_of, *, vocabulary, max_new, stop, length_penalty):
    """Every text there is: up to its first stop id, or max_new ids long; best first."""
    everything = torch.tensor(list(product(range(vocabulary), repeat=max_new)))
    log_p = logits_of(everything).log_softmax(-1).gather(2, everything[..., None])[..., 0].tolist()
    found = {}
    for ids, own in zip(everything.tolist(), log_p, strict=True):
        n = ids.index(stop) + 1 if stop in ids else max_new
        found[tuple(ids[:n])] = sum(own[:n]) / n**length_penalty
    return sorted(found.items(), key=lambda pair: -pair[1])


def after(model, prompt):
    """The logits of each new id after this prompt, for many texts at once, without a cache."""

    def logits_of(new):
        before = torch.tensor([prompt]).expand(len(new), -1)
        return model(torch.cat((before, new), dim=1))[:, len(prompt) - 1 : -1]

    return logits_of


@settings(max_examples=15)
@given(st.integers(0, 99), st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=6), min_size=1, max_size=4))
def test_one_beam_is_greedy(seed, prompts):
    model, stops = small_gpt(seed=seed), frozenset({3, 7})
    greedy = generate(model, prompts, max_new=8, sampling=SamplingConfig(temperature=0), stop_ids=stops)
    beams = beam_generate(model, prompts, max_new=8, beam=BeamConfig(n_beams=1), stop_ids=stops)
    for text, (one,) in zip(greedy, beams, strict=True):
        assert (one.ids, one.finish_reason) == (text.new_ids, text.finish_reason)
        assert one.log_probabilities == pytest.approx(text.log_probabilities)


@settings(max_examples=15)
@given(st.integers(0, 99), penalties)
def test_enough_beams_find_what_trying_everything_finds(seed, length_penalty):
    """3 ids, up to 4 of them: no more than 81 texts, and as many beams."""
    model = small_gpt(seed=seed, vocabulary=3)
    prompts = [[1, 0], [2], [0, 1, 1]]
    beam = BeamConfig(n_beams=81, n_best=7, length_penalty=length_penalty)
    results = beam_generate(model, prompts, max_new=4, beam=beam, stop_ids=frozenset({2}))
    for prompt, found in zip(prompts, results, strict=True):
        expected = brute_force(after(model, prompt), vocabulary=3, max_new=4, stop=2, length_penalty=length_penalty)
        assert [tuple(one.ids) for one in found] == [ids for ids, _ in expected[:7]]
        assert [one.score for one in found] == pytest.approx([score for _, score in expected[:7]])


@settings(max_examples=15)
@given(st.integers(0, 99), penalties, st.integers(1, 5))
def test_scores_are_those_of_a_full_pass_and_fall(seed, length_penalty, n_beams):
    model = small_gpt(seed=seed)
    prompts = [[5, 6, 7], [1]]
    beam = BeamConfig(n_beams=n_beams, n_best=n_beams, length_penalty=length_penalty)
    results = beam_generate(model, prompts, max_new=7, beam=beam, stop_ids=frozenset({2}))
    for prompt, found in zip(prompts, results, strict=True):
        assert len(found) == n_beams
        assert len({tuple(one.ids) for one in found}) == n_beams
        for one in found:
            own = rescored(model, prompt, one.ids)
            assert one.log_probabilities == pytest.approx(own)
            assert one.score == pytest.approx(sum(own) / len(own) ** length_penalty)
            assert 2 not in one.ids[:-1]
            assert one.finish_reason is (FinishReason.STOP if one.ids[-1] == 2 else FinishReason.LENGTH)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


@settings(max_examples=15)
@given(st.integers(0, 99), st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=6), min_size=2, max_size=4))
def test_a_ragged_batch_equals_its_texts_alone(seed, prompts):
    """Texts are done at different steps; the others' beams go on undisturbed."""
    model, beam = small_gpt(seed=seed), BeamConfig(n_beams=3, n_best=2)
    stops = frozenset({2, 3, 5})
    together = beam_generate(model, prompts, max_new=7, beam=beam, stop_ids=stops)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = beam_generate(model, [prompt], max_new=7, beam=beam, stop_ids=stops)
        assert [one.ids for one in found] == [one.ids for one in alone]


def test_more_beams_find_a_likelier_text_than_greedy():
    better = 0
    for seed in range(12):
        model = small_gpt(seed=seed)
        scores = [
            beam_generate(model, [[1]], max_new=6, beam=BeamConfig(n_beams=n, length_penalty=0))[0][0].score
            for n in (1, 5)
        ]
        better += scores[1] > scores[0] + 1e-9
    assert better >= 3


class NoReorder(GPTDecoder):
    """The bug: beams change places and their cache does not."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self.cache.batch:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


def test_a_cache_that_is_not_reordered_is_caught():
    model, prompt = small_gpt(), [1, 2, 3]
    beam, limits = BeamConfig(n_beams=4, n_best=4), [LengthLimit(7, FinishReason.LENGTH)]

    def error(kind):
        with torch.inference_mode():
            decoder = kind(model, batch=1, capacity=11)
            logits = decoder.prefill([prompt])
        (found,) = beam_search(decoder, logits, limits, beam=beam)
        own = [sum(rescored(model, prompt, one.ids)) / len(one.ids) for one in found]
        return max(abs(one.score - score) for one, score in zip(found, own, strict=True))

    assert error(GPTDecoder) < 1e-9
    assert error(NoReorder) > 0.01


class Said:
    """A decoder that gives these probabilities, step after step."""

    def __init__(self, *tables):
        self._tables = iter(tables)

    def step(self, ids):  # noqa: ARG002
        return torch.tensor(next(self._tables)).log()

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        pass


def test_an_end_that_is_not_among_the_likeliest_is_not_taken():
    """After the first step `1 end` has .4 · .5 = .20, the third of all: `0 end` has .39, `0 2` has .21."""
    decoder = Said(
        [[0.0, 0.0, 0.35, 0.65], [0.2, 0.0, 0.3, 0.5]],
        [[0.1, 0.0, 0.0, 0.9], [0.5, 0.0, 0.0, 0.5]],
    )  # fmt: skip
    first, beam = torch.tensor([[0.6, 0.4, 0.0, 0.0]]).log(), BeamConfig(n_beams=2, n_best=2, length_penalty=0)
    (found,) = beam_search(decoder, first, [LengthLimit(9, FinishReason.LENGTH)], beam=beam, stop_ids=frozenset({3}))
    assert [one.ids for one in found] == [[0, 3], [0, 2, 3]]


@settings(max_examples=10)
@given(st.integers(0, 99), penalties)
def test_the_same_search_serves_an_encoder_decoder(seed, length_penalty):
    """Sources of different lengths, one shared by all beams of its text; brute force agrees."""
    config = Seq2SeqConfig(
        vocab_size=3, source_vocab_size=19, share_embeddings=False, context_length=CONTEXT, d_model=12,
        n_heads=3, n_encoder_layers=1, n_decoder_layers=2,
    )  # fmt: skip
    model = shaken(config, seed)
    lengths = [5, 2, 3]
    source_ids = torch.randint(0, 19, (3, 5), generator=torch.Generator().manual_seed(seed))
    attention_mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    with torch.inference_mode():
        decoder = Seq2SeqDecoder(model, model.encode(source_ids, attention_mask=attention_mask), capacity=5)
        logits = decoder.step(torch.tensor([0, 0, 0]))
    limits = [
        LengthLimit(3, FinishReason.LENGTH),
        LengthLimit(1, FinishReason.LENGTH),
        LengthLimit(3, FinishReason.LENGTH),
    ]
    beam = BeamConfig(n_beams=27, n_best=3, length_penalty=length_penalty)
    results = beam_search(decoder, logits, limits, beam=beam, stop_ids=frozenset({2}))
    for row, found in enumerate(results):
        source = source_ids[row : row + 1, : lengths[row]]

        def logits_of(new, source=source):
            before = torch.zeros(len(new), 1, dtype=torch.long)
            return model(source.expand(len(new), -1), torch.cat((before, new), dim=1))[:, :-1]

        expected = brute_force(
            logits_of, vocabulary=3, max_new=limits[row].max_new_tokens, stop=2, length_penalty=length_penalty
        )
        assert [tuple(one.ids) for one in found] == [ids for ids, _ in expected[:3]]
        assert [one.score for one in found] == pytest.approx([score for _, score in expected[:3]])


def test_a_prompt_at_the_context_gets_one_token_and_beyond_is_refused():
    model, beam = small_gpt(), BeamConfig(n_beams=3)
    full = [i % VOCABULARY for i in range(CONTEXT)]
    (first,), (second,) = beam_generate(model, [full, [1]], max_new=4, beam=beam)
    assert (len(first.ids), first.finish_reason) == (1, FinishReason.CONTEXT)
    assert (len(second.ids), second.finish_reason) == (4, FinishReason.LENGTH)
    with pytest.raises(ContextLengthError, match="prompt 0 has 30 tokens; the model's context_length is 29"):
        beam_generate(model, [[1] * 30], max_new=4, beam=beam)


def test_logits_that_are_no_numbers_are_refused():
    model = small_gpt()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"after 0 new tokens the logits are no numbers \(NaN\)"):
        beam_generate(model, [[1]], max_new=4, beam=BeamConfig(n_beams=2))
