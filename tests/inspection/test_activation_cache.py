"""Activation caches with and without a KV cache agree, and model inputs have correct words and labels."""

import pytest
import torch

from qkv.choices import AttentionKind
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.inspection import prepare_input, prepare_input_ids, run_with_cache
from tests.agreement.families import close
from tests.inspection.examples import FAMILIES, TEXT, reading, task


@pytest.mark.parametrize("family", ["gpt", "seq2seq", "rnn"])
@pytest.mark.parametrize("cached_from", [1, 3])
def test_rows_seen_while_generating_with_the_cache_are_those_of_one_pass(family, cached_from):
    model, text = task(family).model, reading(family)
    full, stepped = run_with_cache(model, text), run_with_cache(model, text, cached_from=cached_from)
    close(stepped.logits, full.logits)
    for stack in full.stacks:
        close(stepped.all_weights(stack), full.all_weights(stack))
        assert torch.equal(stepped.visible_mask(stack), full.visible_mask(stack))
    name = "decoder.states" if family == "rnn" else f"{'decoder.' if family == 'seq2seq' else ''}blocks.1.resid_post"
    close(stepped.get_activation(name), full.get_activation(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_weights_sums_to_one_and_the_error_is_small(family):
    seen = run_with_cache(task(family).model, reading(family))
    for stack in seen.stacks:
        weights = seen.all_weights(stack)
        assert weights.shape[2:] == (len(seen.query_labels(stack)), len(seen.key_labels(stack)))
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert seen.error < 1e-12


def test_seeing_leaves_the_model_as_it_was():
    model = task("gpt").model.train()
    before = torch.random.get_rng_state()
    run_with_cache(model, reading("gpt"))
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    model.eval()


def test_a_word_is_found_at_its_tokens_and_the_one_before_the_pronoun_is_meant():
    own = reading("gpt").sequence
    first, second = ([n for n, word in enumerate(own.word_ids) if word == place] for place in (1, 12))
    places = own.find_word("cat")
    assert places == [n for n in second if own.tokens[n] != "."]
    assert own.find_word("cat", before=places[0]) == first
    assert "".join(own.tokens[n] for n in first).strip() == "cat"
    with pytest.raises(InputError, match="'ca'"):
        own.find_word("ca")


def test_a_pair_of_texts_has_segments_and_words_that_go_on():
    pair = prepare_input(task("bert"), "the cat sat", "the dog")
    assert pair.segments is not None
    assert pair.segments[0] == 0
    assert pair.segments[-1] == 1
    assert max(word for word in pair.sequence.word_ids if word is not None) == 4
    assert "".join(pair.sequence.tokens[n] for n in pair.sequence.find_word("dog")).strip() == "dog"


def test_a_translation_is_fed_what_stands_before_each_token():
    one = reading("seq2seq")
    assert one.sequence.ids == [task("seq2seq").decoder_start_id, *one.next_ids[:-1]]
    assert prepare_input(task("seq2seq"), TEXT, one.next_ids) == one
    seen = run_with_cache(task("seq2seq").model, one)
    assert "".join(seen.select_tokens(AttentionKind.CROSS).tokens[:-1]).strip() == "the dog slept"
    assert seen.query_labels(AttentionKind.DECODER)[1:] == seen.query_labels(AttentionKind.CROSS)[:-1]


@pytest.mark.parametrize("family", ["seq2seq", "rnn"])
@pytest.mark.parametrize("target", ["the dog slept", "the dóg 🐕 slept"])
def test_a_word_of_a_translation_is_found_on_both_sides_of_the_decoder(family, target):
    one = prepare_input(task(family), TEXT, target)
    for word in target.split():
        found = one.generated.find_word(word) if word.isalpha() else []
        assert task(family).tokenizer.decode([one.generated.ids[n] for n in found]).strip() in (word, "")
        if found and word != "slept":
            assert one.sequence.find_word(word) == [n + 1 for n in found]
    ends = [span[1] for span in one.generated.spans if span is not None]
    assert ends[-1] == len(one.generated.text.encode())
    assert one.sequence.spans[0] is None
    assert one.select_tokens(AttentionKind.CROSS) is one.generated
    assert one.select_tokens(AttentionKind.DECODER) is one.sequence
    assert one.select_tokens(AttentionKind.ENCODER) is one.select_tokens(AttentionKind.CROSS, is_key=True) is one.source


def test_what_cannot_be_read_is_refused_in_one_line():
    with pytest.raises(ContextLengthError, match=r"\d+ tokens.*context_length.*\b41\b"):
        prepare_input(task("gpt"), "cat " * 99)
    with pytest.raises(InputError, match="GPT"):
        prepare_input(task("gpt"), TEXT, TEXT)
    with pytest.raises(InputError, match="translation"):
        prepare_input(task("rnn"), TEXT)
    with pytest.raises(ConfigError, match=r"cached_from.*BERT"):
        run_with_cache(task("bert").model, reading("bert"), cached_from=1)
    with pytest.raises(InputError, match=r"layer 2.*\b2 layers \(0 … 1\)"):
        run_with_cache(task("gpt").model, reading("gpt")).weights(AttentionKind.SELF, 2)
    with pytest.raises(InputError, match=r"'cross'.*self"):
        run_with_cache(task("gpt").model, reading("gpt")).all_weights(AttentionKind.CROSS)


def test_ids_that_were_generated_are_read_as_they_are():
    ids = reading("gpt").sequence.ids
    assert prepare_input_ids(task("gpt"), ids).sequence.tokens == reading("gpt").sequence.tokens
