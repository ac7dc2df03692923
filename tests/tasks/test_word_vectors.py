"""Static and contextual word vectors, and their distances."""

import pytest
import torch

from qkv.errors import ContextLengthError, InputError
from qkv.tasks.word_vectors import encode_and_locate_tokens, word_ids, word_vectors
from tests.tasks.small_bert import small_bert
from tests.tasks.small_gpt import CONTEXT, small_gpt

TASKS = [small_gpt, small_bert]


@pytest.mark.parametrize("make", TASKS)
def test_a_static_vector_is_the_mean_of_its_token_embeddings(make):
    task = make()
    for word in ("cat", "niño", "😀"):
        ids = word_ids(task.tokenizer, word)
        vectors = word_vectors(task, [word])
        expected = task.model.embedding.token.weight[ids].mean(0).float()
        torch.testing.assert_close(vectors.vectors[0], expected.detach())
        assert vectors.is_contextual == [False]


@pytest.mark.parametrize("make", TASKS)
def test_a_contextual_vector_is_the_mean_state_of_the_marked_word(make):
    task = make()
    ids = torch.tensor([task.tokenizer.encode("El niño comió una manzana")])
    states = (task.model.hidden_states(ids) if make is small_gpt else task.model(ids))[0]
    spans = task.tokenizer.token_spans_without_template("El niño comió una manzana")
    offset = 0 if make is small_gpt else 1
    # Bytes 3 to 8 are the word. A byte-level token may include the preceding space.
    positions = [offset + n for n, span in enumerate(spans) if span.start < 8 and span.end > 3]
    vectors = word_vectors(task, ["El [niño] comió una manzana"])
    torch.testing.assert_close(vectors.vectors[0], states[positions].mean(0).float().detach())
    assert (vectors.words, vectors.is_contextual) == (["niño"], [True])


@pytest.mark.parametrize("make", TASKS)
def test_located_tokens_spell_the_word(make):
    tokenizer = make().tokenizer
    sentence = "the cat sat by the dog and slept"
    ids, positions = encode_and_locate_tokens(tokenizer, sentence, 8, 11)
    assert tokenizer.decode([ids[position] for position in positions]).strip() == "sat"


def test_a_leading_space_is_used_if_it_costs_no_token():
    tokenizer = small_gpt().tokenizer
    assert tokenizer.decode(word_ids(tokenizer, "cat")) == " cat"
    assert len(word_ids(tokenizer, "cat")) == 1


def test_cosine_and_euclidean_distances():
    vectors = word_vectors(small_bert(), ["cat", "dog", "the [cat] sat", "cat"])
    a, b = vectors.vectors[0], vectors.vectors[2]
    assert vectors.cosine[0, 2].item() == pytest.approx((a @ b / (a.norm() * b.norm())).item(), abs=1e-6)
    assert vectors.euclidean[0, 2].item() == pytest.approx((a - b).norm().item(), abs=1e-5)
    assert vectors.cosine[0, 3].item() == pytest.approx(1)
    assert vectors.euclidean[0, 3].item() == 0


def test_a_word_has_different_contextual_vectors_but_one_static_vector():
    contextual = word_vectors(small_bert(), ["the [cat] sat", "the [cat] and the dog"])
    assert contextual.euclidean[0, 1] > 0.1
    static = word_vectors(small_bert(), ["cat", "cat"])
    assert static.euclidean[0, 1] == 0


def test_invalid_items_raise():
    task = small_gpt()
    for items, line in [
        ([], r"\b0$"),
        (["the [cat] and [dog]"], r"\b2 words"),
        (["  "], "'  '"),
        (["a [ ] b"], r"'a \[ \] b'"),
    ]:
        with pytest.raises(InputError, match=line):
            word_vectors(task, items)
    with pytest.raises(ContextLengthError, match=rf"'x' has \d+ tokens.*\b{CONTEXT}\b"):
        word_vectors(task, ["the cat " * 50 + "[x]"])
