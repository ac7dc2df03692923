"""Translation by ids: every fast road gives what the plain one gives, for the Transformer and the RNN alike."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import CellKind, ScoreKind
from qkv.config import BeamConfig, RNNConfig, SamplingConfig, Seq2SeqConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation import (
    FinishReason,
    GeneratedSequence,
    LengthLimit,
    RNNDecoder,
    Seq2SeqDecoder,
    beam_search,
    decode_steps,
    encode_sources,
    translate_reference,
)
from qkv.generation import translate as translate_ids
from qkv.generation.prepacked_weights import PrepackedWeights, prepack_weights
from tests.agreement.families import shaken
from tests.generation.test_beam import brute_force, penalties

VOCABULARY, OF_SOURCE, CONTEXT = 17, 19, 23
FIRST, STOPS = 1, frozenset({2})

kinds = st.sampled_from(("transformer", "dot", "general", "additive", "none"))
sources = st.lists(st.integers(0, OF_SOURCE - 1), min_size=1, max_size=7)


def small(kind, seed, vocabulary=VOCABULARY):
    sizes = {"vocab_size": vocabulary, "source_vocab_size": OF_SOURCE, "context_length": CONTEXT}
    if kind == "transformer":
        layers = {"n_heads": 3, "n_encoder_layers": 1, "n_decoder_layers": 2}
        return shaken(Seq2SeqConfig(**sizes, **layers, d_model=12, share_embeddings=False), seed)
    cell = CellKind.GRU if seed % 2 else CellKind.LSTM
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "cell": cell, "attention": ScoreKind(kind)}
    return shaken(RNNConfig(**sizes, **layers, d_model=10), seed)


def best(model, given_sources, *, max_new=9, n_beams=3, constraints=(), **beam):
    limits = [max_new] * len(given_sources)
    asked = BeamConfig(n_beams=n_beams, n_best=n_beams, **beam)
    return translate_ids(
        model, given_sources, start_id=FIRST, max_new=limits, stop_ids=STOPS, beam=asked, constraints=forced
    )  # fmt: skip


@torch.no_grad()
def rescored(model, source, ids):
    log_p = model(torch.tensor([source]), torch.tensor([[FIRST, *ids[:-1]]]))[0].log_softmax(-1)
    return [float(log_p[i, number]) for i, number in enumerate(ids)]


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), st.lists(sources, min_size=1, max_size=4))
def test_one_beam_is_greedy_and_the_plain_road(kind, seed, many):
    model = small(kind, seed)
    decoder = encode_sources(model, many, capacity=9)
    with torch.inference_mode():
        logits = decoder.step(torch.full((len(many),), FIRST))
    texts = [GeneratedSequence([FIRST], LengthLimit(9, FinishReason.LENGTH)) for _ in many]
    for _ in decode_steps(decoder, logits, texts, sampling=SamplingConfig(temperature=0), stop_ids=STOPS):
        pass
    for source, text, (found,) in zip(many, texts, best(model, many, n_beams=1), strict=True):
        plain = translate_reference(model, source, start_id=FIRST, max_new=9, stop_ids=STOPS)
        assert found.ids == text.new_ids == plain.new_ids
        assert found.finish_reason is plain.finish_reason
        assert found.log_probabilities == pytest.approx(plain.log_probabilities)


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), penalties)
def test_enough_beams_find_what_trying_everything_finds(kind, seed, length_penalty):
    model, many = small(kind, seed, vocabulary=3), [[4, 5, 6, 7], [8], [9, 1]]
    results = best(model, many, max_new=3, n_beams=27, length_penalty=length_penalty)
    for source, found in zip(many, results, strict=True):

        def logits_of(new, source=source):
            before = torch.full((len(new), 1), FIRST)
            return model(torch.tensor([source] * len(new)), torch.cat((before, new), dim=1))[:, :-1]

        expected = brute_force(logits_of, vocabulary=3, max_new=3, stop=2, length_penalty=length_penalty)
        assert [tuple(one.ids) for one in found[:5]] == [ids for ids, _ in expected[:5]]
        assert [one.score for one in found[:5]] == pytest.approx([score for _, score in expected[:5]])


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), st.lists(sources, min_size=2, max_size=5))
def test_a_batch_equals_its_sources_alone_and_scores_are_a_full_passs(kind, seed, many):
    """Padding changes nothing; texts that are done at different steps leave the others undisturbed."""
    model = small(kind, seed)
    for source, found in zip(many, best(model, many), strict=True):
        (alone,) = best(model, [source])
        assert [one.ids for one in found] == [one.ids for one in alone]
        for one in found:
            own = rescored(model, source, one.ids)
            assert one.log_probabilities == pytest.approx(own)
            assert one.score == pytest.approx(sum(own) / len(own))


class NoReorder(Seq2SeqDecoder):
    """The bug: beams change places and their cache does not."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self.cache.batch:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


class NoReorderRNN(RNNDecoder):
    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self._state[0].shape[1]:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


@pytest.mark.parametrize("kind", ["transformer", "general"])
def test_beams_that_are_not_reordered_are_caught(kind):
    model, source = small(kind, 7), [3, 4, 5]

    def error(is_broken):
        with torch.inference_mode():
            encoded = model.encode(torch.tensor([source]))
            if kind == "transformer":
                decoder = (NoReorder if is_broken else Seq2SeqDecoder)(model, encoded, capacity=9)
            else:
                decoder = (NoReorderRNN if is_broken else RNNDecoder)(model, encoded)
            logits = decoder.step(torch.tensor([FIRST]))
        beam = BeamConfig(n_beams=4, n_best=4)
        (found,) = beam_search(decoder, logits, [LengthLimit(8, FinishReason.LENGTH)], beam=beam, stop_ids=STOPS)
        return max(abs(sum(rescored(model, source, one.ids)) / len(one.ids) - one.score) for one in found)

    assert error(is_broken=False) < 1e-9
    assert error(is_broken=True) > 0.01


@settings(max_examples=20)
@given(kinds, st.integers(0, 99), st.integers(1, 4))
def test_no_ngram_comes_twice(kind, seed, n):
    model = small(kind, seed)
    many = [[3, 4, 5], [6]]
    for source, found in zip(many, best(model, many, max_new=14, no_repeat_ngram_size=n), strict=True):
        for one in found:
            ngrams = list(zip(*(one.ids[i:] for i in range(n)), strict=False))
            assert len(set(ngrams)) == len(ngrams)
            assert one.log_probabilities == pytest.approx(rescored(model, source, one.ids))


@settings(max_examples=10)
@given(kinds, st.integers(0, 99), st.integers(1, 6))
def test_no_text_ends_before_its_least_length(kind, seed, least):
    model = small(kind, seed)
    lengths = {len(one.ids) for found in best(model, [[3], [4, 5]], min_new_tokens=least) for one in found}
    assert min(lengths) >= least + 1


terms = st.lists(st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=3).map(tuple), min_size=0, max_size=3)


@settings(max_examples=20)
@given(kinds, st.integers(0, 99), terms, terms, st.integers(1, 5))
def test_forced_terms_always_stand_in_the_text(kind, seed, of_first, of_second, n_beams):
    model, many = small(kind, seed), [[3, 4, 5], [6, 7]]
    results = best(model, many, max_new=12, n_beams=n_beams, constraints=[of_first, of_second])
    for source, own, found in zip(many, (of_first, of_second), results, strict=True):
        assert found
        for one in found:
            for term in own:
                assert term in set(zip(*(one.ids[i:] for i in range(len(term))), strict=False))
            assert one.log_probabilities == pytest.approx(rescored(model, source, one.ids))


@settings(max_examples=10)
@given(kinds, st.integers(0, 99))
def test_a_text_without_terms_is_the_same_beside_one_with_them(kind, seed):
    model, many = small(kind, seed), [[3, 4, 5], [6, 7]]
    free = best(model, many)
    mixed = best(model, many, constraints=[[], [(5, 6)]])
    assert [one.ids for one in free[0]] == [one.ids for one in mixed[0]]


@settings(max_examples=8)
@given(st.integers(0, 99), st.integers(0, 1))
def test_with_enough_beams_the_best_text_with_a_term_is_found(seed, number):
    model, source = small("transformer", seed, vocabulary=3), [4, 5]

    def logits_of(new):
        before = torch.full((len(new), 1), FIRST)
        return model(torch.tensor([source] * len(new)), torch.cat((before, new), dim=1))[:, :-1]

    everything = brute_force(logits_of, vocabulary=3, max_new=3, stop=2, length_penalty=1.0)
    holds = [ids for ids, _ in everything if (number, number) in pairwise(ids)]
    (found,) = best(model, [source], max_new=3, n_beams=27, constraints=[[(number, number)]])
    assert [tuple(one.ids) for one in found] == holds


def test_what_cannot_be_is_refused_with_both_numbers():
    model = small("transformer", 0)
    with pytest.raises(InputError, match="the forced terms are 4 tokens, the text may have 3"):
        best(model, [[3]], max_new=3, constraints=[[(4, 5), (6, 7)]])
    with pytest.raises(
        InputError, match=r"text 0: nothing of at most 6 tokens .*forced terms of 4 tokens.*no_repeat_ngram_size=1"
    ):
        best(model, [[3]], max_new=6, constraints=[[(4, 5), (6, 5)]], no_repeat_ngram_size=1)
    with pytest.raises(ContextLengthError, match="source 1 has 24 tokens; the model's context_length is 23"):
        best(model, [[3], [4] * 24])
    with pytest.raises(InputError, match="source 0 is empty: 0 tokens"):
        best(model, [[]])
    with pytest.raises(InputError, match="source 0: 0 new tokens were asked for; at least 1"):
        best(model, [[3]], max_new=0)
    with pytest.raises(InputError, match="max_new has 1 numbers for 2 sources"):
        translate_ids(model, [[3], [4]], start_id=FIRST, max_new=[5], stop_ids=STOPS)


def test_a_text_that_fills_the_context_says_so():
    model = small("general", 3)
    (found,) = best(model, [[3]], max_new=99, n_beams=1, min_new_tokens=99)
    assert (len(found[0].ids), found[0].finish_reason) == (CONTEXT, FinishReason.CONTEXT)


@pytest.mark.parametrize("kind", ["transformer", "general"])
def test_prepared_weights_change_nothing_but_rounding_and_are_gone_afterwards(kind):
    model, many = small(kind, 5).float(), [[3, 4, 5], [6, 7], [8]]
    seen = []
    model.unembedding.logits.observe(lambda _: seen.append("forward" in model.unembedding.__dict__))
    for source, found in zip(many, best(model, many), strict=True):
        for one in found:
            assert one.log_probabilities == pytest.approx(rescored(model, source, one.ids), abs=1e-4)
    assert seen[0] == torch.backends.mkldnn.is_available()
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(InputError, match="the forced terms are 4 tokens"):
        best(model, [[3]], max_new=3, constraints=[[(4, 5), (6, 7)]])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_weights_that_changed_are_prepared_anew():
    model = small("transformer", 5).float()
    packing = prepack_weights(model)
    for _ in range(2):
        ((one, *_),) = translate_ids(
            model, [[3, 4]], start_id=FIRST, max_new=[5], stop_ids=STOPS, prepacked=packing, beam=BeamConfig(n_beams=2)
        )
        assert one.log_probabilities == pytest.approx(rescored(model, [3, 4], one.ids), abs=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_weights_that_come_to_lie_where_older_ones_did_are_prepared_anew():
    linear = torch.nn.Linear(71, 113)
    packing = PrepackedWeights(linear)
    x = torch.ones(3, 71)
    for step in range(20):
        for value in (-1.0, float(step)):  # freed after one turn, an address is used again in the next
            linear.weight = torch.nn.Parameter(torch.full((113, 71), value))
        torch.testing.assert_close(packing.packed_linear(linear)(x), linear(x))
