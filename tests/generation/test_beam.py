"""Beam search equals greedy decoding with one beam and brute force with enough beams, with exact scores."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import BeamConfig, SamplingConfig, Seq2SeqConfig
from qkv.errors import ContextLengthError, WeightsError
from qkv.generation import (
    FinishReason,
    GPTDecodeEngine,
    LengthLimit,
    beam_generate,
    beam_search,
    eager_engine,
    generate,
)
from tests.agreement.model_strategies import build_random_model
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, score_with_full_pass, small_gpt

penalties = st.sampled_from((0.0, 0.6, 1.0, 1.4))


@torch.no_grad()
def brute_force(compute_logits, *, vocab_size, max_new, stop, length_penalty):
    """All possible outputs with their scores, best first. Each ends at its first stop id or after max_new ids."""
    all_ids = torch.tensor(list(product(range(vocab_size), repeat=max_new)))
    log_p = compute_logits(all_ids).log_softmax(-1).gather(2, all_ids[..., None])[..., 0].tolist()
    scores = {}
    for ids, ids_log_p in zip(all_ids.tolist(), log_p, strict=True):
        n = ids.index(stop) + 1 if stop in ids else max_new
        scores[tuple(ids[:n])] = sum(ids_log_p[:n]) / n**length_penalty
    return sorted(scores.items(), key=lambda pair: -pair[1])


def uncached_logits_after(model, prompt):
    """Return a function that computes the logits of each new id after this prompt, in a batch and without a cache."""

    def compute_logits(new_ids):
        before = torch.tensor([prompt]).expand(len(new_ids), -1)
        return model(torch.cat((before, new_ids), dim=1))[:, len(prompt) - 1 : -1]

    return compute_logits


@settings(max_examples=15)
@given(st.integers(0, 99), st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=6), min_size=1, max_size=4))
def test_one_beam_is_greedy(seed, prompts):
    model, stops = small_gpt(seed=seed), frozenset({3, 7})
    greedy = generate(model, prompts, max_new=8, sampling=SamplingConfig(temperature=0), stop_ids=stops)
    beams = beam_generate(model, prompts, max_new=8, beam=BeamConfig(n_beams=1), stop_ids=stops)
    for sequence, (hypothesis,) in zip(greedy, beams, strict=True):
        assert (hypothesis.ids, hypothesis.finish_reason) == (sequence.new_ids, sequence.finish_reason)
        assert hypothesis.log_probabilities == pytest.approx(sequence.log_probabilities)


@settings(max_examples=15)
@given(st.integers(0, 99), penalties)
def test_beam_search_with_enough_beams_equals_brute_force(seed, length_penalty):
    """With 3 ids and at most 4 tokens, there are at most 81 outputs, and as many beams."""
    model = small_gpt(seed=seed, vocab_size=3)
    prompts = [[1, 0], [2], [0, 1, 1]]
    beam = BeamConfig(n_beams=81, n_best=7, length_penalty=length_penalty)
    results = beam_generate(model, prompts, max_new=4, beam=beam, stop_ids=frozenset({2}))
    for prompt, hypotheses in zip(prompts, results, strict=True):
        expected = brute_force(
            uncached_logits_after(model, prompt), vocab_size=3, max_new=4, stop=2, length_penalty=length_penalty
        )
        assert [tuple(hypothesis.ids) for hypothesis in hypotheses] == [ids for ids, _ in expected[:7]]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([score for _, score in expected[:7]])


@settings(max_examples=15)
@given(st.integers(0, 99), penalties, st.integers(1, 5))
def test_scores_equal_those_of_a_full_pass_and_decrease(seed, length_penalty, n_beams):
    model = small_gpt(seed=seed)
    prompts = [[5, 6, 7], [1]]
    beam = BeamConfig(n_beams=n_beams, n_best=n_beams, length_penalty=length_penalty)
    results = beam_generate(model, prompts, max_new=7, beam=beam, stop_ids=frozenset({2}))
    for prompt, hypotheses in zip(prompts, results, strict=True):
        assert len(hypotheses) == n_beams
        assert len({tuple(hypothesis.ids) for hypothesis in hypotheses}) == n_beams
        for hypothesis in hypotheses:
            log_ps = score_with_full_pass(model, prompt, hypothesis.ids)
            assert hypothesis.log_probabilities == pytest.approx(log_ps)
            assert hypothesis.score == pytest.approx(sum(log_ps) / len(log_ps) ** length_penalty)
            assert 2 not in hypothesis.ids[:-1]
            assert hypothesis.finish_reason is (FinishReason.STOP if hypothesis.ids[-1] == 2 else FinishReason.LENGTH)
        assert [hypothesis.score for hypothesis in hypotheses] == sorted(
            (hypothesis.score for hypothesis in hypotheses), reverse=True
        )


@settings(max_examples=15)
@given(st.integers(0, 99), st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=6), min_size=2, max_size=4))
def test_a_ragged_batch_equals_each_sequence_separately(seed, prompts):
    """Sequences finish at different steps without affecting the others."""
    model, beam = small_gpt(seed=seed), BeamConfig(n_beams=3, n_best=2)
    stops = frozenset({2, 3, 5})
    batched = beam_generate(model, prompts, max_new=7, beam=beam, stop_ids=stops)
    for prompt, hypotheses in zip(prompts, batched, strict=True):
        (separate,) = beam_generate(model, [prompt], max_new=7, beam=beam, stop_ids=stops)
        assert [hypothesis.ids for hypothesis in hypotheses] == [hypothesis.ids for hypothesis in separate]


def test_more_beams_find_more_probable_outputs_than_greedy():
    better = 0
    for seed in range(12):
        model = small_gpt(seed=seed)
        scores = [
            beam_generate(model, [[1]], max_new=6, beam=BeamConfig(n_beams=n, length_penalty=0))[0][0].score
            for n in (1, 5)
        ]
        better += scores[1] > scores[0] + 1e-9
    assert better >= 3


class NoReorder(GPTDecodeEngine):
    """Planted bug: beams are reordered, but their cache is not."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self.cache.batch:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


def test_a_cache_that_is_not_reordered_gives_wrong_scores():
    model, prompt = small_gpt(), [1, 2, 3]
    beam, limits = BeamConfig(n_beams=4, n_best=4), [LengthLimit(7, FinishReason.LENGTH)]

    def max_score_error(decoder_class):
        with torch.inference_mode():
            decoder = decoder_class(model, model.new_cache(batch=1, capacity=11))
            logits = decoder.prefill([prompt])
        (hypotheses,) = beam_search(decoder, logits, limits, beam=beam)
        log_ps = [
            sum(score_with_full_pass(model, prompt, hypothesis.ids)) / len(hypothesis.ids) for hypothesis in hypotheses
        ]
        return max(abs(hypothesis.score - score) for hypothesis, score in zip(hypotheses, log_ps, strict=True))

    assert max_score_error(GPTDecodeEngine) < 1e-9
    assert max_score_error(NoReorder) > 0.01


class ScriptedDecoder:
    """Decoder that returns the given probabilities step by step."""

    def __init__(self, *tables):
        self._tables = iter(tables)

    def prefill(self, prompts, *, sources=None):
        raise NotImplementedError

    def decode(self, ids):  # noqa: ARG002
        return torch.tensor(next(self._tables)).log()

    def close(self):
        pass

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        pass


def test_a_stop_token_outside_the_best_beams_does_not_finish():
    """After the first step, `1 stop` has probability .4 · .5 = .20 and rank 3. `0 stop` has .39 and `0 2` has .21."""
    decoder = ScriptedDecoder(
        [[0.0, 0.0, 0.35, 0.65], [0.2, 0.0, 0.3, 0.5]],
        [[0.1, 0.0, 0.0, 0.9], [0.5, 0.0, 0.0, 0.5]],
    )  # fmt: skip
    first, beam = torch.tensor([[0.6, 0.4, 0.0, 0.0]]).log(), BeamConfig(n_beams=2, n_best=2, length_penalty=0)
    (hypotheses,) = beam_search(
        decoder, first, [LengthLimit(9, FinishReason.LENGTH)], beam=beam, stop_ids=frozenset({3})
    )
    assert [hypothesis.ids for hypothesis in hypotheses] == [[0, 3], [0, 2, 3]]


@settings(max_examples=10)
@given(st.integers(0, 99), penalties)
def test_beam_search_with_an_encoder_decoder_equals_brute_force(seed, length_penalty):
    """Sources have different lengths, and all beams of a sequence share its source."""
    config = Seq2SeqConfig(
        vocab_size=3, source_vocab_size=19, share_embeddings=False, context_length=CONTEXT, d_model=12,
        n_heads=3, n_encoder_layers=1, n_decoder_layers=2,
    )  # fmt: skip
    model = build_random_model(config, seed)
    lengths = [5, 2, 3]
    source_ids = torch.randint(0, 19, (3, 5), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        decoder = eager_engine(model, batch=3, capacity=5)
        logits = decoder.prefill(
            [[0]] * 3, sources=[ids[:n] for ids, n in zip(source_ids.tolist(), lengths, strict=True)]
        )
    limits = [
        LengthLimit(3, FinishReason.LENGTH),
        LengthLimit(1, FinishReason.LENGTH),
        LengthLimit(3, FinishReason.LENGTH),
    ]
    beam = BeamConfig(n_beams=27, n_best=3, length_penalty=length_penalty)
    results = beam_search(decoder, logits, limits, beam=beam, stop_ids=frozenset({2}))
    for row, hypotheses in enumerate(results):
        source = source_ids[row : row + 1, : lengths[row]]

        def compute_logits(new_ids, source=source):
            before = torch.zeros(len(new_ids), 1, dtype=torch.long)
            return model(source.expand(len(new_ids), -1), torch.cat((before, new_ids), dim=1))[:, :-1]

        expected = brute_force(
            compute_logits, vocab_size=3, max_new=limits[row].max_new_tokens, stop=2, length_penalty=length_penalty
        )
        assert [tuple(hypothesis.ids) for hypothesis in hypotheses] == [ids for ids, _ in expected[:3]]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([score for _, score in expected[:3]])


def test_a_prompt_that_fills_the_context_gets_one_token_and_a_longer_one_is_rejected():
    model, beam = small_gpt(), BeamConfig(n_beams=3)
    full = [i % VOCAB_SIZE for i in range(CONTEXT)]
    (first,), (second,) = beam_generate(model, [full, [1]], max_new=4, beam=beam)
    assert (len(first.ids), first.finish_reason) == (1, FinishReason.CONTEXT)
    assert (len(second.ids), second.finish_reason) == (4, FinishReason.LENGTH)
    with pytest.raises(ContextLengthError, match=r"prompt 0 .*\b30\b.*context_length.*\b29\b"):
        beam_generate(model, [[1] * 30], max_new=4, beam=beam)


def test_nan_logits_are_rejected():
    model = small_gpt()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"NaN.*\b0\b"):
        beam_generate(model, [[1]], max_new=4, beam=BeamConfig(n_beams=2))
