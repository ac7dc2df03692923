"""Translation of token ids equals the reference implementation, for Transformers and RNNs."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.choices import CellKind, RNNAttentionScore
from qkv.config import BeamConfig, RNNConfig, SamplingConfig, Seq2SeqConfig
from qkv.engines import decode_engine
from qkv.errors import ContextLengthError, InputError
from qkv.generation import (
    FinishReason,
    GeneratedSequence,
    LengthLimit,
    RNNDecodeEngine,
    Seq2SeqDecodeEngine,
    beam_search,
    decode_steps,
    eager_engine,
    greedy_translate_without_cache,
)
from qkv.generation import translate as translate_ids
from tests.agreement.model_strategies import build_random_model
from tests.generation.test_beam import brute_force, penalties

VOCAB_SIZE, SOURCE_VOCAB_SIZE, CONTEXT = 17, 19, 23
START_ID, STOP_IDS = 1, frozenset({2})

kinds = st.sampled_from(("transformer", "dot", "general", "additive", "none"))
sources = st.lists(st.integers(0, SOURCE_VOCAB_SIZE - 1), min_size=1, max_size=7)


def small_translator(kind, seed, vocab_size=VOCAB_SIZE):
    sizes = {"vocab_size": vocab_size, "source_vocab_size": SOURCE_VOCAB_SIZE, "context_length": CONTEXT}
    if kind == "transformer":
        layers = {"n_heads": 3, "n_encoder_layers": 1, "n_decoder_layers": 2}
        return build_random_model(Seq2SeqConfig(**sizes, **layers, d_model=12, share_embeddings=False), seed)
    cell = CellKind.GRU if seed % 2 else CellKind.LSTM
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "cell": cell, "attention": RNNAttentionScore(kind)}
    return build_random_model(RNNConfig(**sizes, **layers, d_model=10), seed)


def translate_all(
    model, source_ids, *, max_new=9, n_beams=3, constraints=(), create_engine=eager_engine, **beam_options
):
    limits = [max_new] * len(source_ids)
    beam = BeamConfig(n_beams=n_beams, n_best=n_beams, **beam_options)
    return translate_ids(
        model,
        source_ids,
        start_id=START_ID,
        max_new=limits,
        stop_ids=STOP_IDS,
        beam=beam,
        constraints=constraints,
        create_engine=create_engine,
    )


@torch.no_grad()
def score_with_full_pass(model, source, ids):
    log_p = model(torch.tensor([source]), torch.tensor([[START_ID, *ids[:-1]]]))[0].log_softmax(-1)
    return [float(log_p[i, token_id]) for i, token_id in enumerate(ids)]


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), st.lists(sources, min_size=1, max_size=4))
def test_one_beam_equals_greedy_decoding_and_the_reference(kind, seed, source_batch):
    model = small_translator(kind, seed)
    decoder = eager_engine(model, batch=len(source_batch), capacity=9)
    with torch.inference_mode():
        logits = decoder.prefill([[START_ID]] * len(source_batch), sources=source_batch)
    sequences = [GeneratedSequence([START_ID], LengthLimit(9, FinishReason.LENGTH)) for _ in source_batch]
    for _ in decode_steps(decoder, logits, sequences, sampling=SamplingConfig(temperature=0), stop_ids=STOP_IDS):
        pass
    for source, sequence, (hypothesis,) in zip(
        source_batch, sequences, translate_all(model, source_batch, n_beams=1), strict=True
    ):
        reference = greedy_translate_without_cache(model, source, start_id=START_ID, max_new=9, stop_ids=STOP_IDS)
        assert hypothesis.ids == sequence.new_ids == reference.new_ids
        assert hypothesis.finish_reason is reference.finish_reason
        assert hypothesis.log_probabilities == pytest.approx(reference.log_probabilities)


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), penalties)
def test_beam_search_with_enough_beams_equals_brute_force(kind, seed, length_penalty):
    model, source_batch = small_translator(kind, seed, vocab_size=3), [[4, 5, 6, 7], [8], [9, 1]]
    results = translate_all(model, source_batch, max_new=3, n_beams=27, length_penalty=length_penalty)
    for source, hypotheses in zip(source_batch, results, strict=True):

        def compute_logits(new_ids, source=source):
            before = torch.full((len(new_ids), 1), START_ID)
            return model(torch.tensor([source] * len(new_ids)), torch.cat((before, new_ids), dim=1))[:, :-1]

        expected = brute_force(compute_logits, vocab_size=3, max_new=3, stop=2, length_penalty=length_penalty)
        assert [tuple(hypothesis.ids) for hypothesis in hypotheses[:5]] == [ids for ids, _ in expected[:5]]
        assert [hypothesis.score for hypothesis in hypotheses[:5]] == pytest.approx(
            [score for _, score in expected[:5]]
        )


@settings(max_examples=8)
@given(kinds, st.integers(0, 99), st.lists(sources, min_size=2, max_size=5))
def test_a_batch_equals_each_source_separately_with_scores_of_a_full_pass(kind, seed, source_batch):
    """Padding changes nothing, and sequences that finish at different steps do not affect the others."""
    model = small_translator(kind, seed)
    for source, hypotheses in zip(source_batch, translate_all(model, source_batch), strict=True):
        (separate,) = translate_all(model, [source])
        assert [hypothesis.ids for hypothesis in hypotheses] == [hypothesis.ids for hypothesis in separate]
        for hypothesis in hypotheses:
            log_ps = score_with_full_pass(model, source, hypothesis.ids)
            assert hypothesis.log_probabilities == pytest.approx(log_ps)
            assert hypothesis.score == pytest.approx(sum(log_ps) / len(log_ps))


class NoReorder(Seq2SeqDecodeEngine):
    """Planted bug: beams are reordered, but their cache is not."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self.cache.batch:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


class NoReorderRNN(RNNDecodeEngine):
    def reorder(self, rows, *, sequences=None, common_prefix=0):
        if len(rows) > self._state[0].shape[1]:
            super().reorder(rows, sequences=sequences, common_prefix=common_prefix)


@pytest.mark.parametrize("kind", ["transformer", "general"])
def test_beams_that_are_not_reordered_give_wrong_scores(kind):
    model, source = small_translator(kind, 7), [3, 4, 5]

    def max_score_error(is_broken):
        with torch.inference_mode():
            if kind == "transformer":
                cache = model.new_cache(batch=1, capacity=9)
                decoder = (NoReorder if is_broken else Seq2SeqDecodeEngine)(model, cache)
            else:
                decoder = (NoReorderRNN if is_broken else RNNDecodeEngine)(model)
            logits = decoder.prefill([[START_ID]], sources=[source])
        beam = BeamConfig(n_beams=4, n_best=4)
        (hypotheses,) = beam_search(
            decoder, logits, [LengthLimit(8, FinishReason.LENGTH)], beam=beam, stop_ids=STOP_IDS
        )
        return max(
            abs(sum(score_with_full_pass(model, source, hypothesis.ids)) / len(hypothesis.ids) - hypothesis.score)
            for hypothesis in hypotheses
        )

    assert max_score_error(is_broken=False) < 1e-9
    assert max_score_error(is_broken=True) > 0.01


@settings(max_examples=20)
@given(kinds, st.integers(0, 99), st.integers(1, 4))
def test_no_ngram_repeats(kind, seed, n):
    model = small_translator(kind, seed)
    source_batch = [[3, 4, 5], [6]]
    for source, hypotheses in zip(
        source_batch, translate_all(model, source_batch, max_new=14, no_repeat_ngram_size=n), strict=True
    ):
        for hypothesis in hypotheses:
            ngrams = list(zip(*(hypothesis.ids[i:] for i in range(n)), strict=False))
            assert len(set(ngrams)) == len(ngrams)
            assert hypothesis.log_probabilities == pytest.approx(score_with_full_pass(model, source, hypothesis.ids))


@settings(max_examples=10)
@given(kinds, st.integers(0, 99), st.integers(1, 6))
def test_no_output_is_shorter_than_the_minimum_length(kind, seed, minimum):
    model = small_translator(kind, seed)
    lengths = {
        len(hypothesis.ids)
        for hypotheses in translate_all(model, [[3], [4, 5]], min_new_tokens=minimum)
        for hypothesis in hypotheses
    }
    assert min(lengths) >= minimum + 1


terms = st.lists(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=3).map(tuple), min_size=0, max_size=3)


@settings(max_examples=20)
@given(kinds, st.integers(0, 99), terms, terms, st.integers(1, 5))
def test_constraints_always_occur_in_the_output(kind, seed, first_terms, second_terms, n_beams):
    model, source_batch = small_translator(kind, seed), [[3, 4, 5], [6, 7]]
    results = translate_all(model, source_batch, max_new=12, n_beams=n_beams, constraints=[first_terms, second_terms])
    for source, source_terms, hypotheses in zip(source_batch, (first_terms, second_terms), results, strict=True):
        assert hypotheses
        for hypothesis in hypotheses:
            for term in source_terms:
                assert term in set(zip(*(hypothesis.ids[i:] for i in range(len(term))), strict=False))
            assert hypothesis.log_probabilities == pytest.approx(score_with_full_pass(model, source, hypothesis.ids))


@settings(max_examples=10)
@given(kinds, st.integers(0, 99))
def test_constraints_of_another_sequence_change_nothing(kind, seed):
    model, source_batch = small_translator(kind, seed), [[3, 4, 5], [6, 7]]
    unconstrained = translate_all(model, source_batch)
    mixed = translate_all(model, source_batch, constraints=[[], [(5, 6)]])
    assert [hypothesis.ids for hypothesis in unconstrained[0]] == [hypothesis.ids for hypothesis in mixed[0]]


@settings(max_examples=8)
@given(st.integers(0, 99), st.integers(0, 1))
def test_with_enough_beams_the_best_output_with_a_constraint_is_found(seed, token_id):
    model, source = small_translator("transformer", seed, vocab_size=3), [4, 5]

    def compute_logits(new_ids):
        before = torch.full((len(new_ids), 1), START_ID)
        return model(torch.tensor([source] * len(new_ids)), torch.cat((before, new_ids), dim=1))[:, :-1]

    all_outputs = brute_force(compute_logits, vocab_size=3, max_new=3, stop=2, length_penalty=1.0)
    expected = [ids for ids, _ in all_outputs if (token_id, token_id) in pairwise(ids)]
    (hypotheses,) = translate_all(model, [source], max_new=3, n_beams=27, constraints=[[(token_id, token_id)]])
    assert [tuple(hypothesis.ids) for hypothesis in hypotheses] == expected


def test_impossible_requests_are_rejected_with_the_actual_values():
    model = small_translator("transformer", 0)
    with pytest.raises(InputError, match=r"\b4 tokens.*\b3 tokens"):
        translate_all(model, [[3]], max_new=3, constraints=[[(4, 5), (6, 7)]])
    with pytest.raises(InputError, match=r"sequence 0: .*\b6 tokens.*\b4 tokens.*no_repeat_ngram_size=1"):
        translate_all(model, [[3]], max_new=6, constraints=[[(4, 5), (6, 5)]], no_repeat_ngram_size=1)
    with pytest.raises(ContextLengthError, match=r"source 1 .*\b24 tokens.*context_length.*\b23\b"):
        translate_all(model, [[3], [4] * 24])
    with pytest.raises(InputError, match=r"source 0 .*\b0\b"):
        translate_all(model, [[]])
    with pytest.raises(InputError, match=r"source 0: max_new.*\b0\b"):
        translate_all(model, [[3]], max_new=0)
    with pytest.raises(InputError, match=r"max_new.*\b2 sources, got 1$"):
        translate_ids(model, [[3], [4]], start_id=START_ID, max_new=[5], stop_ids=STOP_IDS)


def test_an_output_that_fills_the_context_has_the_finish_reason_context():
    model = small_translator("general", 3)
    (hypotheses,) = translate_all(model, [[3]], max_new=99, n_beams=1, min_new_tokens=99)
    assert (len(hypotheses[0].ids), hypotheses[0].finish_reason) == (CONTEXT, FinishReason.CONTEXT)


@pytest.mark.parametrize("kind", ["transformer", "general"])
def test_the_cpu_backend_only_changes_rounding_and_restores_the_modules(kind):
    model, source_batch = small_translator(kind, 5).float(), [[3, 4, 5], [6, 7], [8]]
    create_engine = partial(decode_engine, backend="cpu")
    modules = dict(model.named_modules())
    for source, hypotheses in zip(
        source_batch, translate_all(model, source_batch, create_engine=create_engine), strict=True
    ):
        for hypothesis in hypotheses:
            assert hypothesis.log_probabilities == pytest.approx(
                score_with_full_pass(model, source, hypothesis.ids), abs=1e-4
            )
    assert dict(model.named_modules()) == modules
    with pytest.raises(InputError, match=r"\b4 tokens.*\b3 tokens"):
        translate_all(model, [[3]], max_new=3, constraints=[[(4, 5), (6, 7)]], create_engine=create_engine)
    assert dict(model.named_modules()) == modules


def test_changed_weights_are_repacked():
    model = small_translator("transformer", 5).float()
    for _ in range(2):
        ((hypothesis, *_),) = translate_ids(
            model,
            [[3, 4]],
            start_id=START_ID,
            max_new=[5],
            stop_ids=STOP_IDS,
            create_engine=partial(decode_engine, backend="cpu"),
            beam=BeamConfig(n_beams=2),
        )
        assert hypothesis.log_probabilities == pytest.approx(
            score_with_full_pass(model, [3, 4], hypothesis.ids), abs=1e-4
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_new_weights_at_a_reused_address_are_repacked():
    linear = torch.nn.Linear(71, 113)
    prepacked = PrepackedWeights()
    x = torch.ones(3, 71)
    for step in range(20):
        for value in (-1.0, float(step)):  # an address freed in hypothesis iteration is reused in the next
            linear.weight = torch.nn.Parameter(torch.full((113, 71), value))
        torch.testing.assert_close(prepacked.packed_linear(linear)(x), linear(x))
