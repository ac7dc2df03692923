"""Batched predictions of a text encoder equal those of single texts, and truncation is explicit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import Pooling, SpecialToken
from qkv.config import SentenceEmbedding
from qkv.data.sampler import batch_by_length
from qkv.errors import ContextLengthError, InputError
from tests.tasks.small_bert import CONTEXT, NAMES, small_bert

TEXTS = [
    "The cat sat on the mat",
    "",
    "the dog",
    "El niño comió una manzana; después durmió",
    "x",
    "and the dog sat",
    "Then both of them slept",
    "the cat sat by the cat and the dog",
    "Zwölf 😀",
    "the mat",
    "It's two blanks",
]
MASKED = ["The [MASK] sat on the [MASK]", "[MASK]", "and the dog sat by the [MASK], then slept", "a [MASK] b"]
PAIRS = [("the cat", "sat"), ("The dog slept", "then both of them slept"), ("", "x"), ("x", "")]
LONG = "the cat " * 40


@pytest.fixture
def small_batches(monkeypatch):
    """Limit the batch size so that a few texts form several batches, some of them padded."""
    monkeypatch.setattr("qkv.engines.CPU_BATCH_TOKENS", 31)
    monkeypatch.setattr("qkv.accel.cpu.encoder.MAX_BATCH_TOKENS", 31)


@given(st.lists(st.integers(1, 19), max_size=23), st.integers(1, 50))
def test_batches_contain_every_index_once_sorted_by_length_within_the_limit(lengths, max_tokens):
    batches = list(batch_by_length(lengths, max_tokens))
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    order = [lengths[position] for batch in batches for position in batch]
    assert order == sorted(lengths)
    assert all(len(batch) == 1 or len(batch) * lengths[batch[-1]] <= max_tokens for batch in batches)


@pytest.mark.parametrize("pooling", Pooling)
def test_batched_embeddings_equal_those_of_single_texts(small_batches, pooling):
    task = small_bert()
    embeddings = task.embed(TEXTS, pooling=pooling, normalize=False)
    for text, vector in zip(TEXTS, embeddings, strict=True):
        states = task.model(torch.tensor([task.tokenizer.encode(text)]))[0]
        single = states[0] if pooling is Pooling.CLS else states.mean(0)
        torch.testing.assert_close(vector, single, rtol=0, atol=1e-9)


def test_batched_mask_predictions_equal_those_of_single_texts(small_batches):
    task = small_bert()
    for text, filled in zip(MASKED, task.fill_mask(MASKED, n=3), strict=True):
        (single,) = task.fill_mask([text], n=3)
        assert filled.text == single.text
        assert len(filled.predictions) == text.count("[MASK]")
        for guesses, expected in zip(filled.predictions, single.predictions, strict=True):
            assert [guess.id for guess in guesses] == [guess.id for guess in expected]
            assert [g.probability for g in guesses] == pytest.approx([g.probability for g in expected], abs=1e-9)


def test_batched_classifications_equal_those_of_single_texts(small_batches):
    task, texts = small_bert(), [*TEXTS, *PAIRS]
    for text, answer in zip(texts, task.classify(texts), strict=True):
        (single,) = task.classify([text])
        assert answer.labels == single.labels
        assert answer.probabilities == pytest.approx(single.probabilities, abs=1e-9)


def test_embeddings_are_normalized_unless_the_config_differs():
    torch.testing.assert_close(small_bert().embed(TEXTS).norm(dim=-1), torch.ones(len(TEXTS)).double())
    task = small_bert(sentence_embedding=SentenceEmbedding(pooling=Pooling.CLS, max_tokens=7))
    assert torch.equal(task.embed(["the cat"]), small_bert().embed(["the cat"], pooling=Pooling.CLS, normalize=False))
    with pytest.raises(ContextLengthError, match=r"text 2 has 8 tokens.*\b7\b.*--truncate"):
        task.embed(["x", "the cat the cat the cat"])


def test_mask_predictions_are_the_softmax_of_the_logits():
    task = small_bert()
    text = "The [MASK] sat on the [MASK]"
    ids = task.tokenizer.encode(text, parse_special_tokens=True)
    positions = [
        position for position, number in enumerate(ids) if number == task.tokenizer.special_id(SpecialToken.MASK)
    ]
    expected = task.model.masked_lm_logits(task.model(torch.tensor([ids])))[0].float().softmax(-1)
    (filled,) = task.fill_mask([text], n=4)
    is_word = torch.tensor([not task.tokenizer.id_to_token(i).startswith("##") for i in range(expected.shape[-1])])
    for position, guesses in zip(positions, filled.predictions, strict=True):
        best = (expected[position] * is_word).topk(4)
        assert [guess.id for guess in guesses] == best.indices.tolist()
        assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist())


@pytest.mark.parametrize(
    ("token", "masked_text", "text"),
    [("dog", "The [MASK] sat on", "The dog sat on"), ("##s", "The[MASK] sat on", "Thes sat on")],
)
def test_the_filled_text_contains_the_most_likely_token(token, masked_text, text):
    task = small_bert()
    number = task.tokenizer.backend.token_to_id(token)
    tap = task.model.masked_lm.unembedding.logits
    undo = tap.intervene(lambda logits: torch.zeros_like(logits).index_fill(-1, torch.tensor([number]), 9.0))
    (filled,) = task.fill_mask([masked_text], n=1)
    undo()
    assert filled.text == text
    assert filled.predictions[0][0].token == token


def test_continuation_tokens_are_only_predicted_directly_after_a_word():
    task = small_bert()
    tap = task.model.masked_lm.unembedding.logits
    part = task.tokenizer.backend.token_to_id("##s")
    undo = tap.intervene(lambda logits: logits.index_fill(-1, torch.tensor([part]), 99.0))
    filled = task.fill_mask(["a [MASK] the[MASK]", "[MASK] sat"], n=3)
    undo()
    offered = [
        any(guess.token == "##s" for guess in mask) for filled_text in filled for mask in filled_text.predictions
    ]
    assert offered == [False, True, False]


def test_the_most_likely_class_is_returned_by_name():
    answers = small_bert().classify([*TEXTS, *PAIRS])
    for answer in answers:
        assert tuple(answer.probabilities) == NAMES
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert answer.labels == (max(answer.probabilities, key=answer.probabilities.__getitem__),)
    assert len({answer.labels for answer in answers}) > 1


def test_multi_label_returns_labels_of_at_least_one_half():
    several, filled_text = small_bert(problem_type="multi-label"), small_bert()
    for answer, logits in zip(several.classify(TEXTS), filled_text.classify(TEXTS), strict=True):
        assert answer.labels == tuple(name for name in NAMES if answer.probabilities[name] >= 0.5)
        odds = [p / (1 - p) for p in answer.probabilities.values()]
        assert [value / sum(odds) for value in odds] == pytest.approx(list(logits.probabilities.values()), abs=1e-6)


def test_regression_returns_the_logit_and_unnamed_classes_are_numbered():
    task = small_bert(class_names=None, n_classes=1)
    ids = torch.tensor([task.tokenizer.encode("the cat")])
    (answer,) = task.classify(["the cat"])
    assert answer.value == pytest.approx(float(task.model.class_logits(task.model(ids)).detach()), abs=1e-6)
    assert (answer.labels, answer.probabilities) == ((), {})
    assert small_bert(class_names=None, n_classes=5).class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("n_segments", [0, 1])
def test_a_model_without_segments_accepts_pairs(n_segments):
    task = small_bert(n_segments=n_segments)
    (answer,) = task.classify([PAIRS[1]])
    (read,) = task.tokenize([PAIRS[1]])
    logits = task.model.class_logits(task.model(torch.tensor([read.ids])))
    assert list(answer.probabilities.values()) == pytest.approx(logits[0].softmax(-1).tolist())


def test_the_segments_of_a_pair_are_used(small_batches):
    task = small_bert()
    pair = task.tokenizer.encode_pair("the cat", "sat")
    ids, segments = torch.tensor([pair.ids]), torch.tensor([pair.segments])
    expected = task.model.next_sentence_logits(task.model(ids, segments=segments)).softmax(-1)[0, 0]
    assert task.next_sentence_probability([("the cat", "sat")]) == pytest.approx([float(expected.detach())], abs=1e-6)
    single = [task.next_sentence_probability([pair])[0] for pair in PAIRS]
    assert task.next_sentence_probability(PAIRS) == pytest.approx(single, abs=1e-6)
    assert max(single) - min(single) > 1e-3
    with pytest.raises(InputError, match="text 2"):
        task.next_sentence_probability([PAIRS[0], "x"])
    assert segments.any()
    without = small_bert(n_segments=0)
    assert len(without.classify(PAIRS)) == len(PAIRS)


def test_similar_texts_are_sorted():
    task = small_bert()
    ((first, second, _),) = task.find_similar(["the dog"], TEXTS, n=3)
    vectors = task.embed(["the dog", *TEXTS])
    cosines = torch.cosine_similarity(vectors[:1], vectors[1:])
    assert (first.index, first.cosine) == (TEXTS.index("the dog"), pytest.approx(1))
    assert second.cosine == pytest.approx(float(cosines.sort(descending=True).values[1]))
    ((only,),) = task.find_similar(["the dog"], ["x"], n=7)
    assert only.index == 0
    with pytest.raises(InputError, match=r"\b1 candidate.*\b0\b"):
        task.find_similar(["the dog"], [])


@pytest.mark.parametrize("row", [LONG, (LONG, "x"), ("x", LONG)])
def test_a_long_text_raises_unless_truncation_is_requested(row):
    task = small_bert()
    with pytest.raises(ContextLengthError, match=rf"text 2 has \d+ tokens.*\b{CONTEXT}\b.*--truncate"):
        task.classify(["x", row])
    assert len(task.classify(["x", row], truncate=True)) == 2
    short, truncated = task.tokenize(["x", row], truncate=True)
    assert (short.n_truncated, len(truncated.ids)) == (0, CONTEXT)
    assert truncated.n_truncated > 0
    assert task.classify([short, truncated]) == task.classify(["x", row], truncate=True)


def test_a_missing_or_truncated_mask_raises():
    task = small_bert()
    with pytest.raises(InputError, match=r"text 2: .*\[MASK\]$"):
        task.fill_mask(["a [MASK]", "a cat"])
    with pytest.raises(InputError, match=rf"text 1: .*\[MASK\].*\b{CONTEXT} tokens"):
        task.fill_mask([LONG + "[MASK]"], truncate=True)


def test_a_missing_head_raises():
    task = small_bert(masked_lm_head=False, next_sentence_head=False, class_names=None)
    for ask, line in [
        (lambda: task.fill_mask(["[MASK]"]), "masked-word head.*fill masks"),
        (lambda: task.classify(["x"]), "classification head"),
        (
            lambda: task.next_sentence_probability([("x", "y")]),
            "next-sentence head",
        ),
    ]:
        with pytest.raises(InputError, match=line):
            ask()
    assert repr(task).endswith(f"context {CONTEXT}: embed)")
    assert repr(small_bert()).endswith("embed, fill, classify, next_sentence)")


def test_a_single_string_returns_a_single_result():
    task = small_bert()
    assert task.classify("the cat") == task.classify(["the cat"])[0]
    assert task.fill_mask("the [MASK]") == task.fill_mask(["the [MASK]"])[0]
    assert torch.equal(task.embed("the cat"), task.embed(["the cat"])[0])
    assert task.find_similar("the cat", TEXTS) == task.find_similar(["the cat"], TEXTS)[0]
    assert task.find_similar("the cat", "the dog") == task.find_similar(["the cat"], ["the dog"])[0]


def test_an_unknown_pooling_raises():
    with pytest.raises(InputError, match=r"pooling .*mean, cls, got 'max'$"):
        small_bert().embed(["x"], pooling="max")


def test_no_texts_return_no_results():
    task = small_bert()
    assert task.embed([]).shape == (0, 12)
    assert (task.fill_mask([]), task.classify([])) == ([], [])
