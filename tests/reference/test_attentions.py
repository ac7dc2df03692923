"""Recorded attention weights compared with the eager attentions of `transformers`."""

import pytest
import torch
import transformers as hf

from qkv.choices import AttentionStack
from qkv.inspection import run_with_cache
from qkv.inspection.model_input import ModelInput, TokenizedText
from tests.reference.published_configs import Case, bert, sides
from tests.reference.test_transformers import loaded

TOLERANCE = 1e-5
GPT2 = {"vocab_size": 31, "n_positions": 23, "n_embd": 35, "n_head": 5, "n_layer": 3}
MARIAN = {
    "vocab_size": 31,
    "max_position_embeddings": 23,
    "d_model": 22,
    **sides(2, 3, 2, 37),
    "decoder_start_token_id": 0,
}
CASES = {
    "gpt2": Case(hf.GPT2LMHeadModel, hf.GPT2Config, {**GPT2, "attn_implementation": "eager"}),
    "bert": Case(hf.BertForMaskedLM, hf.BertConfig, {**bert(35, 3, 5, 37), "attn_implementation": "eager"}),
    "marian": Case(hf.MarianMTModel, hf.MarianConfig, {**MARIAN, "attn_implementation": "eager"}),
}  # fmt: skip


def side(n: int, seed: int) -> TokenizedText:
    ids = torch.randint(1, 31, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenizedText(
        text="", ids=ids, tokens=["x"] * n, word_ids=[None] * n, spans=[None] * n, is_special=[False] * n
    )


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_weights_equal_the_eager_attentions_of_transformers(name):
    theirs = CASES[name].published()
    sequence, source = side(11, 5), side(7, 3) if name == "marian" else None
    next_ids = None if name == "bert" else sequence.ids[1:]
    cache = run_with_cache(loaded(theirs), ModelInput(sequence=sequence, source=source, next_ids=next_ids))
    inputs = {"input_ids": torch.tensor([sequence.ids])}
    if source is not None:
        inputs = {"input_ids": torch.tensor([source.ids]), "decoder_input_ids": torch.tensor([sequence.ids])}
    with torch.no_grad():
        answer = theirs(**inputs, output_attentions=True)
    if name == "marian":
        expected = {
            AttentionStack.ENCODER: answer.encoder_attentions, AttentionStack.DECODER: answer.decoder_attentions,
            AttentionStack.CROSS: answer.cross_attentions,
        }  # fmt: skip
    else:
        expected = {AttentionStack.SELF: answer.attentions}
    assert list(expected) == cache.stacks
    for stack, layers in expected.items():
        weights = cache.all_weights(stack)
        assert weights.shape == torch.cat(layers).shape
        assert (weights - torch.cat(layers)).abs().max() <= TOLERANCE
    assert cache.attention_reconstruction_error <= TOLERANCE
