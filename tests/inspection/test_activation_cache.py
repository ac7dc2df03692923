"""Activation caches with and without a KV cache agree, and model inputs have correct words and labels."""

import pytest
import torch

from qkv.choices import AttentionStack
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.inspection import prepare_gpt_input_from_ids, prepare_input, run_with_cache
from tests.agreement.model_strategies import assert_close
from tests.inspection.examples import FAMILIES, TEXT, example_input, example_task


@pytest.mark.parametrize("family", ["gpt", "seq2seq", "rnn"])
@pytest.mark.parametrize("prefill_length", [1, 3])
def test_activations_with_a_kv_cache_equal_those_of_a_full_pass(family, prefill_length):
    model, text = example_task(family).model, example_input(family)
    full, stepped = run_with_cache(model, text), run_with_cache(model, text, prefill_length=prefill_length)
    assert_close(stepped.logits, full.logits)
    for stack in full.stacks:
        assert_close(stepped.all_weights(stack), full.all_weights(stack))
        assert torch.equal(stepped.visible_mask(stack), full.visible_mask(stack))
    name = "decoder.states" if family == "rnn" else f"{'decoder.' if family == 'seq2seq' else ''}blocks.1.resid_post"
    assert_close(stepped.get_activation(name), full.get_activation(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_weights_sums_to_one_and_the_error_is_small(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    for stack in cache.stacks:
        weights = cache.all_weights(stack)
        assert weights.shape[2:] == (len(cache.query_labels(stack)), len(cache.key_labels(stack)))
        assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert cache.attention_reconstruction_error < 1e-12


def test_run_with_cache_does_not_change_the_model():
    model = example_task("gpt").model.train()
    before = torch.random.get_rng_state()
    run_with_cache(model, example_input("gpt"))
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    model.eval()


def test_find_word_returns_token_positions_and_respects_before():
    sequence = example_input("gpt").sequence
    first, second = ([n for n, word in enumerate(sequence.word_ids) if word == word_id] for word_id in (1, 12))
    positions = sequence.find_last_occurrence("cat")
    assert positions == [n for n in second if sequence.tokens[n] != "."]
    assert sequence.find_last_occurrence("cat", before=positions[0]) == first
    assert "".join(sequence.tokens[n] for n in first).strip() == "cat"
    with pytest.raises(InputError, match="'ca'"):
        sequence.find_last_occurrence("ca")


def test_a_pair_has_segments_and_consecutive_word_ids():
    pair = prepare_input(example_task("bert"), "the cat sat", "the dog")
    assert pair.segments is not None
    assert pair.segments[0] == 0
    assert pair.segments[-1] == 1
    assert max(word for word in pair.sequence.word_ids if word is not None) == 4
    assert "".join(pair.sequence.tokens[n] for n in pair.sequence.find_last_occurrence("dog")).strip() == "dog"


def test_the_decoder_input_is_the_target_shifted_right():
    model_input = example_input("seq2seq")
    assert model_input.sequence.ids == [example_task("seq2seq").decoder_start_id, *model_input.next_ids[:-1]]
    assert prepare_input(example_task("seq2seq"), TEXT, model_input.next_ids) == model_input
    cache = run_with_cache(example_task("seq2seq").model, model_input)
    assert "".join(cache.attention_axis_tokens(AttentionStack.CROSS).tokens[:-1]).strip() == "the dog slept"
    assert cache.query_labels(AttentionStack.DECODER)[1:] == cache.query_labels(AttentionStack.CROSS)[:-1]


@pytest.mark.parametrize("family", ["seq2seq", "rnn"])
@pytest.mark.parametrize("target", ["the dog slept", "the dóg 🐕 slept"])
def test_a_word_of_a_translation_is_found_on_both_sides_of_the_decoder(family, target):
    model_input = prepare_input(example_task(family), TEXT, target)
    for word in target.split():
        positions = model_input.generated.find_last_occurrence(word) if word.isalpha() else []
        assert example_task(family).tokenizer.decode([model_input.generated.ids[n] for n in positions]).strip() in (
            word,
            "",
        )
        if positions and word != "slept":
            assert model_input.sequence.find_last_occurrence(word) == [n + 1 for n in positions]
    ends = [span[1] for span in model_input.generated.spans if span is not None]
    assert ends[-1] == len(model_input.generated.text.encode())
    assert model_input.sequence.spans[0] is None
    assert model_input.attention_axis_tokens(AttentionStack.CROSS) is model_input.generated
    assert model_input.attention_axis_tokens(AttentionStack.DECODER) is model_input.sequence
    assert (
        model_input.attention_axis_tokens(AttentionStack.ENCODER)
        is model_input.attention_axis_tokens(AttentionStack.CROSS, is_key=True)
        is model_input.source
    )


def test_invalid_inputs_raise():
    with pytest.raises(ContextLengthError, match=r"\d+ tokens.*context_length.*\b41\b"):
        prepare_input(example_task("gpt"), "cat " * 99)
    with pytest.raises(InputError, match="GPT"):
        prepare_input(example_task("gpt"), TEXT, TEXT)
    with pytest.raises(InputError, match="translation"):
        prepare_input(example_task("rnn"), TEXT)
    with pytest.raises(ConfigError, match=r"prefill_length.*BERT"):
        run_with_cache(example_task("bert").model, example_input("bert"), prefill_length=1)
    with pytest.raises(InputError, match=r"layer 2.*\b2 layers \(0 … 1\)"):
        run_with_cache(example_task("gpt").model, example_input("gpt")).weights(AttentionStack.SELF, 2)
    with pytest.raises(InputError, match=r"stack .*self.*'cross'"):
        run_with_cache(example_task("gpt").model, example_input("gpt")).all_weights(AttentionStack.CROSS)


def test_an_input_built_from_ids_has_the_same_tokens():
    ids = example_input("gpt").sequence.ids
    assert prepare_gpt_input_from_ids(example_task("gpt"), ids).sequence.tokens == example_input("gpt").sequence.tokens
