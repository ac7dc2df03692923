"""The chunked loss is the plain one, in less memory."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.nn import TokenEmbedding, Unembedding
from qkv.tensors import IGNORE_INDEX
from qkv.training import losses
from qkv.training.losses import chunked_loss_sum, cross_entropy_sum

N_WORDS, D_MODEL = 23, 7


def loss_and_gradients(unembedding, states, targets, *, chunk, smoothing=0.0, road=chunked_loss_sum):
    states = states.clone().requires_grad_()
    unembedding.zero_grad()
    loss = road(unembedding, states, targets, chunk=chunk, smoothing=smoothing)
    (loss / 3).backward()
    return [loss.detach(), states.grad, *[p.grad.clone() for p in unembedding.parameters()]]


@given(
    batch=st.integers(1, 3), length=st.integers(1, 13), chunk=st.integers(1, 50), bias=st.booleans(),
    tied=st.booleans(), scale=st.sampled_from([1.0, 0.3]), smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(
    batch, length, chunk, bias, tied, scale, smoothing, seed
):
    torch.manual_seed(seed)
    tokens = TokenEmbedding(N_WORDS, D_MODEL) if tied else None
    unembedding = Unembedding(N_WORDS, D_MODEL, tied_to=tokens, bias=bias, scale=scale)
    if unembedding.bias is not None:
        torch.nn.init.normal_(unembedding.bias)
    states = torch.randn(batch, length, D_MODEL)
    targets = torch.randint(0, N_WORDS, (batch, length))
    targets[torch.rand(batch, length) < 0.3] = IGNORE_INDEX
    plain = loss_and_gradients(unembedding, states, targets, chunk=None, smoothing=smoothing)
    chunked = loss_and_gradients(unembedding, states, targets, chunk=chunk, smoothing=smoothing)
    for one, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def plain_errors(logits, targets, n_words, smoothing, *, wants_errors):
    """What the GPU's kernel says it does."""
    log_p = logits[:, :n_words].float().log_softmax(-1)
    at, is_wanted = targets.clamp(min=0)[:, None], targets != IGNORE_INDEX
    aim = torch.full_like(log_p, smoothing / n_words).scatter_add_(1, at, torch.full(at.shape, 1 - smoothing))
    if wants_errors:
        logits[:, n_words:] = 0
        logits[:, :n_words] = (log_p.exp() - aim) * is_wanted[:, None]
    return -(aim * log_p).sum(1) * is_wanted


@pytest.mark.parametrize("chunk", [4, 15])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gpus_loss_by_its_kernel_is_the_plain_one(chunk, smoothing, bias, monkeypatch):
    monkeypatch.setitem(sys.modules, "qkv.training.loss_kernel", SimpleNamespace(cross_entropy_inplace=plain_errors))
    unembedding = Unembedding(N_WORDS, D_MODEL, bias=bias)
    if unembedding.bias is not None:
        torch.nn.init.normal_(unembedding.bias)
    states, targets = torch.randn(3, 5, D_MODEL), torch.randint(0, N_WORDS, (3, 5))
    targets[0, ::2] = IGNORE_INDEX

    def road(unembedding, states, targets, *, chunk, smoothing):
        flat, weight, bias = states.flatten(0, 1), unembedding.weight, unembedding.bias
        return losses._ByKernel.apply(flat, weight, bias, targets.flatten(), chunk, smoothing)

    plain = loss_and_gradients(unembedding, states, targets, chunk=None, smoothing=smoothing)
    by_kernel = loss_and_gradients(unembedding, states, targets, chunk=chunk, smoothing=smoothing, road=road)
    for one, other in zip(plain, by_kernel, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_smoothing_aims_at_a_share_of_every_word():
    logits, targets = torch.randn(5, N_WORDS), torch.randint(0, N_WORDS, (5,))
    aim = torch.full((5, N_WORDS), 0.1 / N_WORDS).scatter_add(1, targets[:, None], torch.full((5, 1), 0.9))
    expected = -(aim * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy_sum(logits, targets, smoothing=0.1), expected)


def test_a_tied_table_gets_the_gradient_of_both_its_uses():
    ids, targets = torch.randint(0, N_WORDS, (2, 5)), torch.randint(0, N_WORDS, (2, 5))
    gradients = []
    for chunk in (None, 3):
        torch.manual_seed(1)
        tokens = TokenEmbedding(N_WORDS, D_MODEL)
        unembedding = Unembedding(N_WORDS, D_MODEL, tied_to=tokens)
        chunked_loss_sum(unembedding, tokens(ids), targets, chunk=chunk).backward()
        gradients.append(tokens.weight.grad)
    torch.testing.assert_close(*gradients)


def test_without_gradients_the_loss_is_the_same():
    unembedding = Unembedding(N_WORDS, D_MODEL)
    states, targets = torch.randn(2, 11, D_MODEL), torch.randint(0, N_WORDS, (2, 11))
    with torch.no_grad():
        plain = chunked_loss_sum(unembedding, states, targets)
        torch.testing.assert_close(chunked_loss_sum(unembedding, states, targets, chunk=4), plain)


def test_where_nothing_is_predicted_nothing_is_lost():
    logits, targets = torch.randn(2, 3, N_WORDS), torch.full((2, 3), IGNORE_INDEX)
    assert cross_entropy_sum(logits, targets) == 0


def largest_allocation(function) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_the_chunked_loss_never_holds_all_logits():
    n_words, n_positions = 1009, 512
    unembedding = Unembedding(n_words, D_MODEL)
    states, targets = torch.randn(1, n_positions, D_MODEL), torch.randint(0, n_words, (1, n_positions))
    all_logits = 4 * n_words * n_positions
    plain = largest_allocation(lambda: loss_and_gradients(unembedding, states, targets, chunk=None))
    chunked = largest_allocation(lambda: loss_and_gradients(unembedding, states, targets, chunk=32))
    assert plain > all_logits
    assert chunked < all_logits / 2


def test_the_chunked_loss_lets_its_gradients_go_once_they_are_used():
    unembedding = Unembedding(N_WORDS, D_MODEL)
    states = torch.randn(1, 11, D_MODEL, requires_grad=True)
    loss = chunked_loss_sum(unembedding, states, torch.randint(0, N_WORDS, (1, 11)), chunk=4)
    assert len(loss.grad_fn.gradients) == 3
    loss.backward()
    assert not loss.grad_fn.gradients
