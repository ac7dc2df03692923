"""Tests of the recurrent encoder, decoder and attention."""

import pytest
import torch

from qkv.choices import CellKind, RNNAttentionScore
from qkv.errors import InputError
from qkv.nn import Mask
from qkv.nn.recurrent import AttentiveDecoder, BidirectionalRecurrentEncoder, StateAttention

BATCH, N, N_SOURCE, D_MODEL = 2, 5, 7, 6

cells = pytest.mark.parametrize("cell", list(CellKind))
kinds = pytest.mark.parametrize("kind", [RNNAttentionScore.DOT, RNNAttentionScore.GENERAL, RNNAttentionScore.ADDITIVE])
IS_TOKEN = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0]]).bool()


def encoder(cell: CellKind, n_layers: int = 2) -> BidirectionalRecurrentEncoder:
    return BidirectionalRecurrentEncoder(D_MODEL, cell=cell, n_layers=n_layers, n_decoder_layers=3)


@cells
def test_padding_is_never_read(cell):
    part, x = encoder(cell), torch.randn(BATCH, N_SOURCE, D_MODEL)
    garbage = x + 100 * (~IS_TOKEN)[..., None]
    states, first = part(x, IS_TOKEN)
    other_states, other_first = part(garbage, IS_TOKEN)
    assert torch.equal(states, other_states)
    for state, other_state in zip(first, other_first, strict=True):
        assert torch.equal(state, other_state)


@cells
def test_half_of_a_state_depends_on_the_past_and_half_on_the_future(cell):
    part, x = encoder(cell, n_layers=1), torch.randn(1, N_SOURCE, D_MODEL)
    changed = x.clone()
    changed[:, 3] += 1.0
    differs = (part(x)[0] - part(changed)[0]).abs().amax(0) > 1e-6
    there, back = differs[:, : D_MODEL // 2].any(1), differs[:, D_MODEL // 2 :].any(1)
    assert there.tolist() == [False] * 3 + [True] * 4
    assert back.tolist() == [True] * 4 + [False] * 3


@cells
def test_the_initial_decoder_state_is_computed_from_both_last_states(cell):
    part, x = encoder(cell, n_layers=1), torch.randn(BATCH, N_SOURCE, D_MODEL)
    states, first = part(x)
    assert len(first) == (1 if cell is CellKind.GRU else 2)
    assert first[0].shape == (3, BATCH, D_MODEL)
    half = D_MODEL // 2
    last = torch.cat((states[:, -1, :half], states[:, 0, half:]), dim=-1)
    torch.testing.assert_close(first[0], torch.tanh(part.bridge[0](last)).expand(3, -1, -1))


@cells
def test_a_row_without_tokens_is_rejected(cell):
    attention_mask = torch.stack((torch.ones(N_SOURCE), torch.zeros(N_SOURCE))).bool()
    with pytest.raises(InputError, match=r"row 1\b.*\b0\b"):
        encoder(cell)(torch.randn(BATCH, N_SOURCE, D_MODEL), attention_mask)


def reference_value(part: StateAttention, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    match part.kind:
        case RNNAttentionScore.DOT:
            return query @ key
        case RNNAttentionScore.GENERAL:
            return query @ part.k_proj.weight @ key
        case RNNAttentionScore.ADDITIVE:
            return part.score_proj.weight[0] @ torch.tanh(part.q_proj.weight @ query + part.k_proj.weight @ key)
    raise ValueError(part.kind)


@kinds
def test_each_score_is_its_formula_and_the_answer_is_the_weighted_sum_of_states(kind):
    part = StateAttention(D_MODEL, kind=kind)
    queries, states = torch.randn(1, N, D_MODEL), torch.randn(1, N_SOURCE, D_MODEL)
    recorded = []
    part.scores.observe(recorded.append)
    got = part(queries, states)
    scores = torch.stack([torch.stack([reference_value(part, q, k) for k in states[0]]) for q in queries[0]])
    torch.testing.assert_close(recorded[0][0, 0], scores)
    torch.testing.assert_close(got[0], scores.softmax(-1) @ states[0])


@kinds
def test_padding_of_the_source_is_not_attended_to(kind):
    part = StateAttention(D_MODEL, kind=kind)
    queries, states = torch.randn(BATCH, N, D_MODEL), torch.randn(BATCH, N_SOURCE, D_MODEL)
    got = part(queries, states, mask=Mask(key_padding_mask=IS_TOKEN))
    for row in range(BATCH):
        alone = part(queries[row : row + 1], states[row : row + 1, IS_TOKEN[row]])
        torch.testing.assert_close(got[row : row + 1], alone)


@kinds
def test_rows_that_share_a_source_equal_rows_with_repeated_sources(kind):
    part = StateAttention(D_MODEL, kind=kind)
    queries, states = torch.randn(3 * BATCH, N, D_MODEL), torch.randn(BATCH, N_SOURCE, D_MODEL)
    mask, copied = Mask(key_padding_mask=IS_TOKEN), Mask(key_padding_mask=IS_TOKEN.repeat_interleave(3, 0))
    expected = part(queries, states.repeat_interleave(3, 0), mask=copied)
    torch.testing.assert_close(part(queries, states, mask=mask), expected)


@cells
@pytest.mark.parametrize("kind", list(RNNAttentionScore))
def test_steps_one_by_one_equal_all_at_once(cell, kind):
    part = AttentiveDecoder(D_MODEL, cell=cell, n_layers=3, kind=kind)
    source = torch.randn(BATCH, N_SOURCE, D_MODEL)
    first = encoder(cell)(source)[1]
    x = torch.randn(BATCH, N, D_MODEL)
    full_output, last = part(x, first, source=source)
    state, steps = first, []
    for i in range(N):
        step, state = part(x[:, i : i + 1], state, source=source)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, dim=1), full_output)
    for actual, expected in zip(state, last, strict=True):
        torch.testing.assert_close(actual, expected)


@cells
def test_the_decoder_joins_context_and_state(cell):
    part = AttentiveDecoder(D_MODEL, cell=cell, n_layers=1, kind=RNNAttentionScore.DOT)
    source, x = torch.randn(BATCH, N_SOURCE, D_MODEL), torch.randn(BATCH, N, D_MODEL)
    first = tuple(torch.randn(1, BATCH, D_MODEL) for _ in range(1 if cell is CellKind.GRU else 2))
    recorded = []
    part.states.observe(recorded.append)
    out, _ = part(x, first, source=source)
    context = torch.softmax(recorded[0] @ source.mT, dim=-1) @ source
    torch.testing.assert_close(out, torch.tanh(part.combine(torch.cat((context, recorded[0]), dim=-1))))


def test_without_attention_the_source_is_ignored():
    part = AttentiveDecoder(D_MODEL, cell=CellKind.GRU, n_layers=1, kind=RNNAttentionScore.NONE)
    x, first = torch.randn(BATCH, N, D_MODEL), (torch.randn(1, BATCH, D_MODEL),)
    output, other_output = (part(x, first, source=torch.randn(BATCH, N_SOURCE, D_MODEL))[0] for _ in range(2))
    assert torch.equal(output, other_output)


@pytest.mark.parametrize("cell", list(CellKind))
def test_autocast_leaves_the_recurrence_in_its_own_precision(cell):
    encoder = BidirectionalRecurrentEncoder(14, cell=cell, n_layers=2, n_decoder_layers=3)
    decoder = AttentiveDecoder(14, cell=cell, n_layers=3, kind=RNNAttentionScore.GENERAL)
    x, attention_mask = torch.randn(3, 5, 14), torch.arange(5) < torch.tensor([[5], [2], [4]])
    plain, _ = encoder(x, attention_mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, first = encoder(x.bfloat16().float(), attention_mask)
        _, last = decoder(x, first, source=states)
    assert states.dtype == last[0].dtype == torch.float32
    torch.testing.assert_close(states, plain, rtol=0, atol=0.02)
