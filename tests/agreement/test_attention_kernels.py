"""The fused attention kernel agrees with the eager implementation and is really used."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import AttentionKernel, HeadCombination, PositionKind
from qkv.config import GPTConfig
from qkv.nn import CAUSAL, AttentionInputs, Mask, use_attention_kernel
from qkv.nn.attention import fused_attention
from tests.agreement.model_strategies import (
    assert_close,
    berts,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    seeds,
    seq2seqs,
)
from tests.agreement.operator_counter import Operators


def run_both_kernels(model, run):
    """Returns the fused and the eager result, and the operators of each."""
    with torch.no_grad():
        with Operators() as fused_operators:
            fused = run(model)
        with use_attention_kernel(model, AttentionKernel.EAGER), Operators() as plain_operators:
            plain = run(model)
    return fused, plain, fused_operators, plain_operators


def assert_kernels_agree(model, run, *, n_attentions):
    fused, plain, on_fused, on_plain = run_both_kernels(model, run)
    assert_close(fused, plain)
    assert (on_fused.n_fused, on_fused.n_softmax) == (n_attentions, 0)
    assert (on_plain.n_fused, on_plain.n_softmax) == (0, n_attentions)


@given(gpts(fusable=True), seeds, st.integers(1, 11))
def test_gpt_with_the_fused_kernel_equals_eager(config, seed, n):
    model = build_random_model(config, seed)
    assert_kernels_agree(model, lambda gpt: gpt(random_ids(seed, 3, n)), n_attentions=2)


@given(berts(fusable=True), seeds, st.booleans())
def test_bert_with_the_fused_kernel_equals_eager(config, seed, padded):
    model = build_random_model(config, seed)
    attention_mask = torch.ones(3, 7, dtype=torch.bool)
    attention_mask[1, 4:] = False
    attention_mask[2] = False  # a row of only padding gives zeros, not NaN
    marks = {"attention_mask": attention_mask} if padded else {}
    assert_kernels_agree(model, lambda bert: bert(random_ids(seed, 3, 7), **marks), n_attentions=2)


@given(seq2seqs(fusable=True), seeds)
def test_seq2seq_with_the_fused_kernel_equals_eager(config, seed):
    model = build_random_model(config, seed)
    assert_kernels_agree(
        model, lambda both: both(random_source_ids(seed, 3, 5), random_ids(seed, 3, 7)), n_attentions=2 + 2 * 3
    )


@given(gpts(fusable=True), seeds)
def test_a_cached_step_is_fused_too(config, seed):
    model = build_random_model(config, seed)

    def two_passes(gpt):
        ids, cache = random_ids(seed, 3, 7), gpt.new_cache(batch=3)
        gpt(ids[:, :4], cache=cache)
        return gpt(ids[:, 4:], cache=cache)

    assert_kernels_agree(model, two_passes, n_attentions=2 * 2)


@given(gpts(), seeds)
def test_values_of_another_width_agree_although_torch_has_no_fused_kernel_for_them(config, seed):
    model = build_random_model(config, seed)
    fused, plain, on_fused, _ = run_both_kernels(model, lambda gpt: gpt(random_ids(seed, 3, 7)))
    assert_close(fused, plain)
    is_fusable = model.config.d_value == model.config.d_head
    assert on_fused.n_fused == (2 if is_fusable else 0)


def gradients(model, kernel):
    model.zero_grad()
    with use_attention_kernel(model, kernel):
        model(random_ids(1, 3, 7)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("positions", PositionKind)
def test_gradients_agree(positions):
    model = build_random_model(GPTConfig(vocab_size=23, context_length=29, d_model=12, n_heads=3, n_layers=2,
                             positions=positions, relative_buckets=8, relative_max_distance=13))  # fmt: skip
    plain, fused = gradients(model, AttentionKernel.EAGER), gradients(model, AttentionKernel.FUSED)
    assert plain.keys() == fused.keys()
    for name in plain:
        assert_close(fused[name], plain[name])


MASKS = {
    "none": None,
    "causal": CAUSAL,
    "window": Mask(causal=True, sliding_window=2),
    "padding": Mask(key_padding_mask=torch.tensor([[True, True, False, True, False]] * 3)),
    "documents": Mask(causal=True, documents=torch.tensor([[0, 0, 1, 1, 1]] * 3)),
    "one head's table": Mask(dense=torch.rand(3, 6, 5, 5, generator=torch.Generator().manual_seed(7)) < 0.5),
}


@pytest.mark.parametrize("n_kv_heads", [6, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_every_kind_of_mask_keeps_the_fused_kernel(mask, with_bias, n_kv_heads):
    queries = torch.randn(3, 6, 5, 4, dtype=torch.float64)
    keys, values = torch.randn(2, 3, n_kv_heads, 5, 4, dtype=torch.float64)
    bias = torch.randn(1, 6, 5, 5, dtype=torch.float64) if with_bias else None
    lookup = AttentionInputs(queries=queries, keys=keys, values=values, scale=0.5, mask=mask, bias=bias)
    with Operators() as operators:
        fused = fused_attention(lookup)
    assert_close(fused, lookup.weighted_values(lookup.weights()))
    assert (operators.n_fused, operators.n_softmax) == (1, 0)


@pytest.mark.parametrize("layout", [HeadCombination.POOLED, HeadCombination.POOLED_MEAN])
def test_pooled_heads_fall_back_to_the_math_kernel_of_torch(layout):
    # The fused CPU kernel of torch 2.13 requires d_value = d_head. If this test fails, it supports more.
    model = build_random_model(
        GPTConfig(vocab_size=23, context_length=29, d_model=12, n_heads=3, n_layers=1, head_combination=layout)
    )
    with torch.no_grad(), Operators() as operators:
        model(random_ids(1, 3, 7))
    assert (operators.n_fused, operators.n_softmax) == (0, 1)
