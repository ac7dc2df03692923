"""A word's vector: its row of the table alone, its state in a sentence; and how far apart two of them are."""

import pytest
import torch

from qkv.errors import ContextLengthError, InputError
from qkv.tasks.word_vectors import locate_tokens, word_ids, word_vectors
from tests.tasks.small_bert import small_bert
from tests.tasks.small_gpt import CONTEXT, small_task

TASKS = [small_task, small_bert]


@pytest.mark.parametrize("make", TASKS)
def test_a_word_alone_is_its_row_of_the_table_and_several_tokens_are_their_mean(make):
    task = make()
    for word in ("cat", "niño", "😀"):
        ids = word_ids(task.tokenizer, word)
        found = word_vectors(task, [word])
        expected = task.model.embedding.token.weight[ids].mean(0).float()
        torch.testing.assert_close(found.vectors[0], expected.detach())
        assert found.is_contextual == [False]


@pytest.mark.parametrize("make", TASKS)
def test_a_marked_word_is_its_state_in_the_sentence(make):
    task = make()
    ids = torch.tensor([task.tokenizer.encode("El niño comió una manzana")])
    states = (task.model.hidden_states(ids) if make is small_task else task.model(ids))[0]
    pieces = task.tokenizer.token_spans("El niño comió una manzana")
    before = 0 if make is small_task else 1
    # Bytes 3 to 8 are the word; a byte-level piece may begin with the blank before it.
    own = [before + n for n, piece in enumerate(pieces) if piece.start < 8 and piece.end > 3]
    found = word_vectors(task, ["El [niño] comió una manzana"])
    torch.testing.assert_close(found.vectors[0], states[own].mean(0).float().detach())
    assert (found.words, found.is_contextual) == (["niño"], [True])


@pytest.mark.parametrize("make", TASKS)
def test_the_place_of_a_word_spells_the_word(make):
    tokenizer = make().tokenizer
    sentence = "the cat sat by the dog and slept"
    ids, places = locate_tokens(tokenizer, sentence, 8, 11)
    assert tokenizer.decode([ids[place] for place in places]).strip() == "sat"


def test_a_blank_before_the_word_is_taken_where_it_costs_no_token():
    tokenizer = small_task().tokenizer
    assert tokenizer.decode(word_ids(tokenizer, "cat")) == " cat"
    assert len(word_ids(tokenizer, "cat")) == 1


def test_cosine_and_euclid_are_their_formulas():
    found = word_vectors(small_bert(), ["cat", "dog", "the [cat] sat", "cat"])
    a, b = found.vectors[0], found.vectors[2]
    assert found.cosine[0, 2].item() == pytest.approx((a @ b / (a.norm() * b.norm())).item(), abs=1e-6)
    assert found.euclidean[0, 2].item() == pytest.approx((a - b).norm().item(), abs=1e-5)
    assert found.cosine[0, 3].item() == pytest.approx(1)
    assert found.euclidean[0, 3].item() == 0


def test_one_word_in_two_sentences_has_two_vectors_and_one_row():
    contextual = word_vectors(small_bert(), ["the [cat] sat", "the [cat] and the dog"])
    assert contextual.euclidean[0, 1] > 0.1
    static = word_vectors(small_bert(), ["cat", "cat"])
    assert static.euclidean[0, 1] == 0


def test_what_is_no_word_is_refused():
    task = small_task()
    for items, line in [
        ([], "there are 0 words"),
        (["the [cat] and [dog]"], r"marks 2 words with \[ \]; one at a time"),
        (["  "], "holds no word"),
        (["a [ ] b"], "holds no word"),
    ]:
        with pytest.raises(InputError, match=line):
            word_vectors(task, items)
    with pytest.raises(ContextLengthError, match=rf"'x' has \d+ tokens.*\b{CONTEXT}\b"):
        word_vectors(task, ["the cat " * 50 + "[x]"])
