"""Text in, words, classes and vectors out: together as alone, in order, and nothing cut in silence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import Pooling, SpecialToken
from qkv.config import SentenceEmbedding
from qkv.errors import ContextLengthError, InputError
from qkv.tasks.batches import batch_by_length
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
def few_at_once(monkeypatch):
    """So that even these few texts are several batches, some of them padded."""
    monkeypatch.setattr("qkv.tasks.batch_encoder.ENCODER_BATCH_TOKENS", {"cpu": 31})


@given(st.lists(st.integers(1, 19), max_size=23), st.integers(1, 50))
def test_batches_hold_each_place_once_from_short_to_long_within_the_tokens(lengths, at_once):
    batches = list(batch_by_length(lengths, at_once))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    order = [lengths[place] for batch in batches for place in batch]
    assert order == sorted(lengths)
    assert all(len(batch) == 1 or len(batch) * lengths[batch[-1]] <= at_once for batch in batches)


@pytest.mark.parametrize("pooling", Pooling)
def test_vectors_of_many_texts_are_those_of_each_alone(few_at_once, pooling):
    task = small_bert()
    together = task.embed(TEXTS, pooling=pooling, normalize=False)
    for text, vector in zip(TEXTS, together, strict=True):
        states = task.model(torch.tensor([task.tokenizer.encode(text)]))[0]
        alone = states[0] if pooling is Pooling.CLS else states.mean(0)
        torch.testing.assert_close(vector, alone, rtol=0, atol=1e-9)


def test_guesses_of_many_texts_are_those_of_each_alone(few_at_once):
    task = small_bert()
    for text, filled in zip(MASKED, task.fill_mask(MASKED, n=3), strict=True):
        (alone,) = task.fill_mask([text], n=3)
        assert filled.text == alone.text
        assert len(filled.predictions) == text.count("[MASK]")
        for guesses, expected in zip(filled.predictions, alone.predictions, strict=True):
            assert [guess.id for guess in guesses] == [guess.id for guess in expected]
            assert [g.probability for g in guesses] == pytest.approx([g.probability for g in expected], abs=1e-9)


def test_classes_of_texts_and_pairs_are_those_of_each_alone(few_at_once):
    task, texts = small_bert(), [*TEXTS, *PAIRS]
    for text, answer in zip(texts, task.classify(texts), strict=True):
        (alone,) = task.classify([text])
        assert answer.labels == alone.labels
        assert answer.probabilities == pytest.approx(alone.probabilities, abs=1e-9)


def test_vectors_have_length_1_unless_the_model_was_trained_otherwise():
    torch.testing.assert_close(small_bert().embed(TEXTS).norm(dim=-1), torch.ones(len(TEXTS)).double())
    task = small_bert(sentence_embedding=SentenceEmbedding(pooling=Pooling.CLS, max_tokens=7))
    assert torch.equal(task.embed(["the cat"]), small_bert().embed(["the cat"], pooling=Pooling.CLS, normalize=False))
    with pytest.raises(ContextLengthError, match=r"text 2 has 8 tokens.*\b7\b.*--truncate"):
        task.embed(["x", "the cat the cat the cat"])


def test_a_mask_gets_the_softmax_of_its_own_logits():
    task = small_bert()
    text = "The [MASK] sat on the [MASK]"
    ids = task.tokenizer.encode(text, parse_special_tokens=True)
    places = [place for place, number in enumerate(ids) if number == task.tokenizer.special_id(SpecialToken.MASK)]
    expected = task.model.masked_word_logits(task.model(torch.tensor([ids])))[0].float().softmax(-1)
    (filled,) = task.fill_mask([text], n=4)
    is_word = torch.tensor([not task.tokenizer.id_to_token(i).startswith("##") for i in range(expected.shape[-1])])
    for place, guesses in zip(places, filled.predictions, strict=True):
        best = (expected[place] * is_word).topk(4)
        assert [guess.id for guess in guesses] == best.indices.tolist()
        assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist())


@pytest.mark.parametrize(
    ("says", "asked", "text"),
    [("dog", "The [MASK] sat on", "The dog sat on"), ("##s", "The[MASK] sat on", "Thes sat on")],
)
def test_the_filled_text_has_the_likeliest_token_in_place(says, asked, text):
    task = small_bert()
    number = task.tokenizer.backend.token_to_id(says)
    tap = task.model.masked_word.unembedding.logits
    undo = tap.intervene(lambda logits: torch.zeros_like(logits).index_fill(-1, torch.tensor([number]), 9.0))
    (filled,) = task.fill_mask([asked], n=1)
    undo()
    assert filled.text == text
    assert filled.predictions[0][0].token == says


def test_a_part_of_a_word_is_offered_only_close_behind_one():
    task = small_bert()
    tap = task.model.masked_word.unembedding.logits
    part = task.tokenizer.backend.token_to_id("##s")
    undo = tap.intervene(lambda logits: logits.index_fill(-1, torch.tensor([part]), 99.0))
    filled = task.fill_mask(["a [MASK] the[MASK]", "[MASK] sat"], n=3)
    undo()
    offered = [any(guess.token == "##s" for guess in mask) for one in filled for mask in one.predictions]
    assert offered == [False, True, False]


def test_one_class_is_the_likeliest_by_name():
    answers = small_bert().classify([*TEXTS, *PAIRS])
    for answer in answers:
        assert tuple(answer.probabilities) == NAMES
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert answer.labels == (max(answer.probabilities, key=answer.probabilities.__getitem__),)
    assert len({answer.labels for answer in answers}) > 1


def test_several_labels_are_those_of_at_least_one_half():
    several, one = small_bert(problem_type="multi-label"), small_bert()
    for answer, logits in zip(several.classify(TEXTS), one.classify(TEXTS), strict=True):
        assert answer.labels == tuple(name for name in NAMES if answer.probabilities[name] >= 0.5)
        odds = [p / (1 - p) for p in answer.probabilities.values()]
        assert [value / sum(odds) for value in odds] == pytest.approx(list(logits.probabilities.values()), abs=1e-6)


def test_a_number_is_the_head_itself_and_classes_without_names_have_numbers():
    task = small_bert(class_names=None, n_classes=1)
    ids = torch.tensor([task.tokenizer.encode("the cat")])
    (answer,) = task.classify(["the cat"])
    assert answer.number == pytest.approx(float(task.model.class_logits(task.model(ids)).detach()), abs=1e-6)
    assert (answer.labels, answer.probabilities) == ((), {})
    assert small_bert(class_names=None, n_classes=5).class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("n_segments", [0, 1])
def test_a_model_that_tells_no_segments_apart_takes_a_pair_as_it_stands(n_segments):
    task = small_bert(n_segments=n_segments)
    (answer,) = task.classify([PAIRS[1]])
    (read,) = task.encode([PAIRS[1]])
    logits = task.model.class_logits(task.model(torch.tensor([read.ids])))
    assert list(answer.probabilities.values()) == pytest.approx(logits[0].softmax(-1).tolist())


def test_the_segments_of_a_pair_are_read(few_at_once):
    task = small_bert()
    pair = task.tokenizer.encode_pair("the cat", "sat")
    ids, segments = torch.tensor([pair.ids]), torch.tensor([pair.segments])
    expected = task.model.next_sentence_logits(task.model(ids, segments=segments)).softmax(-1)[0, 0]
    assert task.next_sentence_probability([("the cat", "sat")]) == pytest.approx([float(expected.detach())], abs=1e-6)
    alone = [task.next_sentence_probability([pair])[0] for pair in PAIRS]
    assert task.next_sentence_probability(PAIRS) == pytest.approx(alone, abs=1e-6)
    assert max(alone) - min(alone) > 1e-3
    with pytest.raises(InputError, match="text 2"):
        task.next_sentence_probability([PAIRS[0], "x"])
    assert segments.any()
    without = small_bert(n_segments=0)
    assert len(without.classify(PAIRS)) == len(PAIRS)


def test_the_nearest_texts_come_first():
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
def test_a_text_longer_than_the_context_is_cut_only_when_asked_and_it_is_said(row):
    task = small_bert()
    with pytest.raises(ContextLengthError, match=rf"text 2 has \d+ tokens.*\b{CONTEXT}\b.*--truncate"):
        task.classify(["x", row])
    assert len(task.classify(["x", row], truncate=True)) == 2
    short, cut = task.encode(["x", row], truncate=True)
    assert (short.n_truncated, len(cut.ids)) == (0, CONTEXT)
    assert cut.n_truncated > 0
    assert task.classify([short, cut]) == task.classify(["x", row], truncate=True)


def test_a_mask_that_is_missing_or_cut_off_is_named():
    task = small_bert()
    with pytest.raises(InputError, match=r"text 2: .*\[MASK\]$"):
        task.fill_mask(["a [MASK]", "a cat"])
    with pytest.raises(InputError, match=rf"text 1: .*\[MASK\].*\b{CONTEXT} tokens"):
        task.fill_mask([LONG + "[MASK]"], truncate=True)


def test_a_head_that_is_missing_is_one_line():
    task = small_bert(masked_lm_head=False, next_sentence_head=False, class_names=None)
    for ask, line in [
        (lambda: task.fill_mask(["[MASK]"]), "this model has no masked-word head, so it cannot fill masks"),
        (lambda: task.classify(["x"]), "this model has no classification head, so it cannot classify"),
        (
            lambda: task.next_sentence_probability([("x", "y")]),
            "this model has no next-sentence head, so it cannot tell what follows",
        ),
    ]:
        with pytest.raises(InputError, match=line):
            ask()
    assert repr(task).endswith(f"context {CONTEXT}: embed)")
    assert repr(small_bert()).endswith("embed, fill, classify, next_sentence)")


def test_one_string_has_one_answer():
    task = small_bert()
    assert task.classify("the cat") == task.classify(["the cat"])[0]
    assert task.fill_mask("the [MASK]") == task.fill_mask(["the [MASK]"])[0]
    assert torch.equal(task.embed("the cat"), task.embed(["the cat"])[0])
    assert task.find_similar("the cat", TEXTS) == task.find_similar(["the cat"], TEXTS)[0]
    assert task.find_similar("the cat", "the dog") == task.find_similar(["the cat"], ["the dog"])[0]


def test_an_unknown_pooling_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"pooling='max'.*mean, cls"):
        small_bert().embed(["x"], pooling="max")


def test_no_texts_have_no_answers():
    task = small_bert()
    assert task.embed([]).shape == (0, 12)
    assert (task.fill_mask([]), task.classify([])) == ([], [])
