"""Tests of embeddings, unembedding and the validation of ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn import TokenEmbedding, Unembedding
from qkv.nn.embedding import InputEmbedding, check_ids_shape_dtype_range
from qkv.nn.norm import LayerNorm
from qkv.nn.positions import LearnedPositions

BATCH, N, VOCABULARY, D_MODEL, N_SEGMENTS = 2, 7, 11, 5, 3


def random_ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, N))


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=N))
def test_an_embedding_equals_one_hot_times_the_table(ids):
    part, ids = TokenEmbedding(VOCABULARY, D_MODEL), torch.tensor([ids])
    one_hot = F.one_hot(ids, VOCABULARY).float()
    assert torch.equal(part(ids), one_hot @ part.weight)


def test_the_input_is_token_times_scale_plus_segment_plus_position_then_normed():
    part = InputEmbedding(
        TokenEmbedding(VOCABULARY, D_MODEL),
        position=LearnedPositions(N, D_MODEL),
        n_segments=N_SEGMENTS,
        scale=3.0,
        norm=LayerNorm(D_MODEL),
    )
    ids, segments, positions = random_ids(), torch.randint(N_SEGMENTS, (BATCH, N)), torch.arange(N)[None]
    total = part.token.weight[ids] * 3.0 + part.segment.weight[segments] + part.position.table.weight[positions]
    torch.testing.assert_close(part(ids, positions, segments), part.norm(total))
    of_first = part.token.weight[ids] * 3.0 + part.segment.weight[0] + part.position.table.weight[positions]
    torch.testing.assert_close(part(ids, positions), part.norm(of_first))


def test_the_taps_observe_the_token_embeddings_and_the_sum():
    part = InputEmbedding(TokenEmbedding(VOCABULARY, D_MODEL), position=LearnedPositions(N, D_MODEL), scale=2.0)
    activations = {}
    part.tokens.observe(lambda passing: activations.__setitem__("tokens", passing))
    part.sum.observe(lambda passing: activations.__setitem__("sum", passing))
    ids = random_ids()
    out = part(ids, torch.arange(N)[None])
    assert torch.equal(activations["tokens"], part.token.weight[ids] * 2.0)
    assert torch.equal(activations["sum"], out)


def test_dropout_is_only_active_in_training():
    part = InputEmbedding(TokenEmbedding(VOCABULARY, D_MODEL), position=None, dropout=0.5)
    ids, positions = random_ids(), torch.arange(N)[None]
    assert bool((part(ids, positions) == 0).any())
    assert torch.equal(part.eval()(ids, positions), part.token.weight[ids])


def test_a_tied_unembedding_is_the_token_table_itself():
    tokens = TokenEmbedding(VOCABULARY, D_MODEL)
    part = Unembedding(VOCABULARY, D_MODEL, tied_to=tokens)
    assert part.weight is tokens.weight
    x = torch.randn(BATCH, N, D_MODEL)
    torch.testing.assert_close(part(x), x @ tokens.weight.T)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("bias", [False, True])
def test_an_untied_unembedding_has_separate_weights(bias, scale):
    part, x = Unembedding(VOCABULARY, D_MODEL, bias=bias, scale=scale), torch.randn(BATCH, N, D_MODEL)
    expected = x @ part.weight.T * scale
    if bias:
        with torch.no_grad():
            part.bias.copy_(torch.arange(float(VOCABULARY)))
        expected = expected + torch.arange(float(VOCABULARY))
    torch.testing.assert_close(part(x), expected)


def test_ids_outside_the_vocabulary_are_rejected():
    with pytest.raises(InputError, match=r"id 11\b.*0 … 10"):
        check_ids_shape_dtype_range(torch.tensor([[0, 11, 3]]), 11)
    with pytest.raises(InputError, match=r"id -1\b.*0 … 10"):
        check_ids_shape_dtype_range(torch.tensor([[0, -1, 12]]), 11)
    check_ids_shape_dtype_range(torch.tensor([[0, 10]]), 11)
    with pytest.raises(InputError, match=r"id 11\b"):
        TokenEmbedding(VOCABULARY, D_MODEL)(torch.tensor([[11]]))


def test_an_empty_sequence_and_an_empty_batch_are_rejected():
    with pytest.raises(ShapeError, match=r"\(2, 0\)"):
        check_ids_shape_dtype_range(torch.empty(BATCH, 0, dtype=torch.long), 11)
    with pytest.raises(ShapeError, match=r"\(0, 7\)"):
        check_ids_shape_dtype_range(torch.empty(0, N, dtype=torch.long), 11)


def test_segments_that_do_not_fit_are_rejected(unchecked):
    tokens, ids, positions = TokenEmbedding(VOCABULARY, D_MODEL), random_ids(), torch.arange(N)[None]
    with_segments = InputEmbedding(tokens, position=None, n_segments=N_SEGMENTS)
    with pytest.raises(ShapeError, match=r"segments\b.*\(2, 6\).*\(2, 7\)"):
        with_segments(ids, positions, torch.zeros(BATCH, 6, dtype=torch.long))
    with pytest.raises(InputError, match=r"segment 3\b.*0 … 2"):
        with_segments(ids, positions, torch.full((BATCH, N), 3))
    with pytest.raises(ConfigError, match="n_segments"):
        InputEmbedding(tokens, position=None)(ids, positions, torch.zeros_like(ids))


def test_ids_must_have_two_axes():
    with pytest.raises(ShapeError, match=r"ids\b.*\(3,\)"):
        check_ids_shape_dtype_range(torch.tensor([1, 2, 3]), 11)
    with pytest.raises(ShapeError, match=r"ids\b.*\(1, 1, 2\)"):
        check_ids_shape_dtype_range(torch.tensor([[[1, 2]]]), 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_ids_of_other_dtypes_are_rejected(dtype):
    with pytest.raises(InputError, match=f"ids .*{dtype}"):
        check_ids_shape_dtype_range(torch.ones(BATCH, N, dtype=dtype), 11)
    check_ids_shape_dtype_range(torch.ones(BATCH, N, dtype=torch.int32), 11)
