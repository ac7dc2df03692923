"""Tests for cross-entropy losses."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.accel.cuda.fused_modules import FusedUnembedding, find_fused_loss
from qkv.accel.swap import share_attributes
from qkv.nn import TokenEmbedding, Unembedding
from qkv.tensors import IGNORE_INDEX
from qkv.training.objectives import chunked_loss_sum, cross_entropy_sum

VOCAB_SIZE, D_MODEL = 23, 7


def loss_and_gradients(unembedding, states, targets, *, chunk, smoothing=0.0, function=chunked_loss_sum):
    states = states.clone().requires_grad_()
    unembedding.zero_grad()
    loss = function(unembedding, states, targets, chunk=chunk, smoothing=smoothing)
    (loss / 3).backward()
    return [loss.detach(), states.grad, *[p.grad.clone() for p in unembedding.parameters()]]


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 13),
    chunk=st.integers(1, 50),
    bias=st.booleans(),
    tied=st.booleans(),
    scale=st.sampled_from([1.0, 0.3]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 99),
)
def test_the_chunked_loss_equals_the_full_loss(batch, length, chunk, bias, tied, scale, smoothing, seed):
    torch.manual_seed(seed)
    tokens = TokenEmbedding(VOCAB_SIZE, D_MODEL) if tied else None
    unembedding = Unembedding(VOCAB_SIZE, D_MODEL, tied_to=tokens, bias=bias, scale=scale)
    if unembedding.bias is not None:
        torch.nn.init.normal_(unembedding.bias)
    states = torch.randn(batch, length, D_MODEL)
    targets = torch.randint(0, VOCAB_SIZE, (batch, length))
    targets[torch.rand(batch, length) < 0.3] = IGNORE_INDEX
    full = loss_and_gradients(unembedding, states, targets, chunk=None, smoothing=smoothing)
    chunked = loss_and_gradients(unembedding, states, targets, chunk=chunk, smoothing=smoothing)
    for expected, actual in zip(full, chunked, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def reference_kernel(logits, targets, vocab_size, smoothing, *, compute_gradient):
    """Reference implementation of the Triton kernel."""
    log_p = logits[:, :vocab_size].float().log_softmax(-1)
    target_index, has_target = targets.clamp(min=0)[:, None], targets != IGNORE_INDEX
    target_distribution = torch.full_like(log_p, smoothing / vocab_size).scatter_add_(
        1, target_index, torch.full(target_index.shape, 1 - smoothing)
    )
    if compute_gradient:
        logits[:, vocab_size:] = 0
        logits[:, :vocab_size] = (log_p.exp() - target_distribution) * has_target[:, None]
    return -(target_distribution * log_p).sum(1) * has_target


@pytest.mark.parametrize("chunk", [4, 15])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_loss_equals_the_full_loss(chunk, smoothing, bias, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "qkv.accel.cuda.loss_kernel", SimpleNamespace(cross_entropy_per_row_inplace=reference_kernel)
    )
    unembedding = Unembedding(VOCAB_SIZE, D_MODEL, bias=bias)
    if unembedding.bias is not None:
        torch.nn.init.normal_(unembedding.bias)
    states, targets = torch.randn(3, 5, D_MODEL), torch.randint(0, VOCAB_SIZE, (3, 5))
    targets[0, ::2] = IGNORE_INDEX

    def function(unembedding, states, targets, *, chunk, smoothing):
        replaced = share_attributes(unembedding, FusedUnembedding)
        return find_fused_loss(replaced)(states, targets, chunk=chunk, smoothing=smoothing)

    full = loss_and_gradients(unembedding, states, targets, chunk=None, smoothing=smoothing)
    with_kernel = loss_and_gradients(unembedding, states, targets, chunk=chunk, smoothing=smoothing, function=function)
    for expected, actual in zip(full, with_kernel, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_label_smoothing_spreads_probability_over_the_vocabulary():
    logits, targets = torch.randn(5, VOCAB_SIZE), torch.randint(0, VOCAB_SIZE, (5,))
    target_distribution = torch.full((5, VOCAB_SIZE), 0.1 / VOCAB_SIZE).scatter_add(
        1, targets[:, None], torch.full((5, 1), 0.9)
    )
    expected = -(target_distribution * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy_sum(logits, targets, smoothing=0.1), expected)


def test_a_tied_embedding_gets_the_gradients_of_both_uses():
    ids, targets = torch.randint(0, VOCAB_SIZE, (2, 5)), torch.randint(0, VOCAB_SIZE, (2, 5))
    gradients = []
    for chunk in (None, 3):
        torch.manual_seed(1)
        tokens = TokenEmbedding(VOCAB_SIZE, D_MODEL)
        unembedding = Unembedding(VOCAB_SIZE, D_MODEL, tied_to=tokens)
        chunked_loss_sum(unembedding, tokens(ids), targets, chunk=chunk).backward()
        gradients.append(tokens.weight.grad)
    torch.testing.assert_close(*gradients)


def test_without_gradients_the_loss_is_the_same():
    unembedding = Unembedding(VOCAB_SIZE, D_MODEL)
    states, targets = torch.randn(2, 11, D_MODEL), torch.randint(0, VOCAB_SIZE, (2, 11))
    with torch.no_grad():
        full = chunked_loss_sum(unembedding, states, targets)
        torch.testing.assert_close(chunked_loss_sum(unembedding, states, targets, chunk=4), full)


def test_ignored_targets_have_zero_loss():
    logits, targets = torch.randn(2, 3, VOCAB_SIZE), torch.full((2, 3), IGNORE_INDEX)
    assert cross_entropy_sum(logits, targets) == 0


def peak_allocation(function) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    allocated = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@pytest.mark.filterwarnings("ignore")  # from the profiler itself
def test_the_chunked_loss_never_holds_all_logits():
    vocab_size, n_positions = 1009, 512
    unembedding = Unembedding(vocab_size, D_MODEL)
    states, targets = torch.randn(1, n_positions, D_MODEL), torch.randint(0, vocab_size, (1, n_positions))
    all_logits = 4 * vocab_size * n_positions
    full = peak_allocation(lambda: loss_and_gradients(unembedding, states, targets, chunk=None))
    chunked = peak_allocation(lambda: loss_and_gradients(unembedding, states, targets, chunk=32))
    assert full > all_logits
    assert chunked < all_logits / 2


def test_the_chunked_loss_releases_its_gradients_after_use():
    unembedding = Unembedding(VOCAB_SIZE, D_MODEL)
    states = torch.randn(1, 11, D_MODEL, requires_grad=True)
    loss = chunked_loss_sum(unembedding, states, torch.randint(0, VOCAB_SIZE, (1, 11)), chunk=4)
    assert len(loss.grad_fn.gradients) == 3
    loss.backward()
    assert not loss.grad_fn.gradients
