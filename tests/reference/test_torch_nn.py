"""Modules compared with their counterparts in `torch.nn`."""

import pytest
import torch
from torch import nn

from qkv.choices import Activation, AttentionKernel, CellKind, NormPosition
from qkv.nn import CAUSAL, Attention, Block, FeedForward, HeadConfig, Mask, Source, use_attention_kernel
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.recurrent import BidirectionalRecurrentEncoder
from tests.reference.config_strategies import arrays
from tests.reference.numpy_recurrent import gru_step, lstm_step

BATCH, N, N_SOURCE, N_HEADS, D_HEAD, D_FF = 2, 7, 5, 3, 4, 19
D_MODEL = N_HEADS * D_HEAD

kernels = pytest.mark.parametrize("kernel", list(AttentionKernel))


def randomized(module: nn.Module) -> nn.Module:
    """Returns the module in float64 with random weights, so that no bias is 0 and no norm is 1."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.3)
    return module


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padding(n: int) -> torch.Tensor:
    """Returns an attention mask whose row 0 is full and whose row 1 ends in two padding tokens."""
    return torch.arange(n) < torch.tensor([[n], [n - 2]])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    """Copy the weights. torch stacks W_Q, W_K and W_V in one matrix."""
    parts = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        for part, weight, bias in zip(parts, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


def attentions() -> tuple[Attention, nn.MultiheadAttention]:
    theirs = randomized(nn.MultiheadAttention(D_MODEL, N_HEADS, batch_first=True))
    ours = Attention(D_MODEL, HeadConfig.split(D_MODEL, N_HEADS)).double().eval()
    copy_attention(ours, theirs)
    return ours, theirs


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_self_attention_equals_torch_multihead_attention(kernel, is_causal, is_padded):
    ours, theirs = attentions()
    x = random_tensor(BATCH, N, D_MODEL)
    attention_mask = padding(N) if is_padded else None
    mask = Mask(causal=is_causal, key_padding_mask=attention_mask) if is_causal or is_padded else None
    with use_attention_kernel(ours, kernel):
        got = ours(x, mask=mask)
    expected, _ = theirs(
        x,
        x,
        x,
        attn_mask=torch.ones(N, N, dtype=torch.bool).triu(1) if is_causal else None,  # in torch, True means masked
        key_padding_mask=None if attention_mask is None else ~attention_mask,
        need_weights=False,
    )
    assert_close(got, expected)


@kernels
@pytest.mark.parametrize("is_padded", [False, True])
def test_cross_attention_equals_torch_multihead_attention(kernel, is_padded):
    ours, theirs = attentions()
    x, source = random_tensor(BATCH, N, D_MODEL), random_tensor(BATCH, N_SOURCE, D_MODEL)
    attention_mask = padding(N_SOURCE) if is_padded else None
    with use_attention_kernel(ours, kernel):
        got = ours(x, source=source, mask=None if attention_mask is None else Mask(key_padding_mask=attention_mask))
    expected, _ = theirs(
        x, source, source, key_padding_mask=None if attention_mask is None else ~attention_mask, need_weights=False
    )
    assert_close(got, expected)


def test_the_weights_of_each_head_equal_torch_multihead_attention():
    ours, theirs = attentions()
    x, source = random_tensor(BATCH, N, D_MODEL), random_tensor(BATCH, N_SOURCE, D_MODEL)
    recorded = []
    end = ours.weights.observe(recorded.append)
    ours(x, source=source)
    end()
    _, expected = theirs(x, source, source, average_attn_weights=False)
    assert_close(recorded[0], expected)


def block(norm_position: NormPosition, activation: Activation, *, cross: bool) -> Block:
    return Block(
        attention=Attention(D_MODEL, HeadConfig.split(D_MODEL, N_HEADS)),
        cross_attention=Attention(D_MODEL, HeadConfig.split(D_MODEL, N_HEADS)) if cross else None,
        feed_forward=FeedForward(D_MODEL, D_FF, activation=activation),
        norms=[LayerNorm(D_MODEL) for _ in range(3 if cross else 2)],
        norm_position=norm_position,
    ).double()


def copy_layer(ours: Block, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    copy_attention(ours.attention, theirs.self_attn)
    ours.feed_forward.up_proj.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.down_proj.load_state_dict(theirs.linear2.state_dict())
    ours.attention_norm.load_state_dict(theirs.norm1.state_dict())
    if isinstance(theirs, nn.TransformerDecoderLayer):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        ours.cross_attention_norm.load_state_dict(theirs.norm2.state_dict())
        ours.feed_forward_norm.load_state_dict(theirs.norm3.state_dict())
    else:
        ours.feed_forward_norm.load_state_dict(theirs.norm2.state_dict())


layers = pytest.mark.parametrize(
    ("norm_position", "activation"),
    [(where, what) for where in NormPosition for what in (Activation.RELU, Activation.GELU)],
)


@kernels
@layers
def test_a_block_equals_torch_transformer_encoder_layer(norm_position, activation, kernel):
    theirs = randomized(
        nn.TransformerEncoderLayer(
            D_MODEL,
            N_HEADS,
            D_FF,
            0.0,
            activation.value,
            batch_first=True,
            norm_first=norm_position is NormPosition.PRE,
        )
    )
    ours = block(norm_position, activation, cross=False)
    copy_layer(ours, theirs)
    x, attention_mask = random_tensor(BATCH, N, D_MODEL), padding(N)
    with use_attention_kernel(ours, kernel):
        got = ours(x, mask=Mask(key_padding_mask=attention_mask))
    # With gradients, because torch's inference fast path returns zeros at padding.
    expected = theirs(x, src_key_padding_mask=~attention_mask)
    assert_close(got, expected)


@kernels
@layers
def test_a_block_with_a_source_equals_torch_transformer_decoder_layer(norm_position, activation, kernel):
    theirs = randomized(
        nn.TransformerDecoderLayer(
            D_MODEL,
            N_HEADS,
            D_FF,
            0.0,
            activation.value,
            batch_first=True,
            norm_first=norm_position is NormPosition.PRE,
        )
    )
    ours = block(norm_position, activation, cross=True)
    copy_layer(ours, theirs)
    x, source, attention_mask = (
        random_tensor(BATCH, N, D_MODEL),
        random_tensor(BATCH, N_SOURCE, D_MODEL),
        padding(N_SOURCE),
    )
    with use_attention_kernel(ours, kernel):
        got = ours(x, mask=CAUSAL, source=Source(states=source, mask=Mask(key_padding_mask=attention_mask)))
    expected = theirs(
        x, source, tgt_mask=torch.ones(N, N, dtype=torch.bool).triu(1), memory_key_padding_mask=~attention_mask
    )
    assert_close(got, expected)


@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
def test_layer_norm_equals_torch_layer_norm(epsilon):
    theirs = randomized(nn.LayerNorm(D_MODEL, eps=epsilon))
    ours = LayerNorm(D_MODEL, eps=epsilon).double()
    ours.load_state_dict(theirs.state_dict())
    x = random_tensor(BATCH, N, D_MODEL)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
def test_rms_norm_equals_torch_rms_norm(epsilon):
    theirs = randomized(nn.RMSNorm(D_MODEL, eps=epsilon))
    ours = RMSNorm(D_MODEL, eps=epsilon).double()
    ours.load_state_dict(theirs.state_dict())
    x = random_tensor(BATCH, N, D_MODEL)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("cell", list(CellKind))
def test_the_recurrent_encoder_equals_torch_run_row_by_row_without_padding(cell, n_layers):
    kind = nn.GRU if cell is CellKind.GRU else nn.LSTM
    theirs = randomized(kind(D_MODEL, D_MODEL // 2, n_layers, batch_first=True, bidirectional=True))
    ours = randomized(BidirectionalRecurrentEncoder(D_MODEL, cell=cell, n_layers=n_layers, n_decoder_layers=2))
    ours.recurrence.load_state_dict(theirs.state_dict())
    # Row 0 is padded on the right, row 1 not at all, row 2 on the left; the padding contains random values.
    attention_mask = torch.tensor([[1] * 4 + [0] * 3, [1] * 7, [0] * 2 + [1] * 5]).bool()
    x = random_tensor(3, N, D_MODEL)
    states, first = ours(x, attention_mask)
    assert torch.equal(states[~attention_mask], torch.zeros_like(states[~attention_mask]))
    for row in range(3):
        expected, last = theirs(x[row : row + 1, attention_mask[row]])
        assert_close(states[row, attention_mask[row]], expected[0])
        last = last if isinstance(last, tuple) else (last,)
        for got, part, bridge in zip(first, last, ours.bridge, strict=True):
            joined = torch.cat((part[-2, 0], part[-1, 0]))
            assert_close(got[:, row], torch.tanh(bridge(joined)).expand(2, -1))


@pytest.mark.parametrize(("cell", "step"), [(CellKind.GRU, gru_step), (CellKind.LSTM, lstm_step)])
def test_the_manual_gate_equations_equal_the_recurrence(cell, step):
    encoder = randomized(BidirectionalRecurrentEncoder(D_MODEL, cell=cell, n_layers=1, n_decoder_layers=1))
    x = random_tensor(1, N, D_MODEL)
    states, _ = encoder(x)
    weights = arrays(encoder)
    half = D_MODEL // 2
    for ending, positions in (("", range(N)), ("_reverse", reversed(range(N)))):
        cell_weights = [
            weights[f"recurrence.{part}_l0{ending}"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        state = (torch.zeros(half).double().numpy(), torch.zeros(half).double().numpy())
        columns = slice(0, half) if ending == "" else slice(half, None)
        for position in positions:
            state = step(x[0, position].numpy(), state, *cell_weights)
            assert_close(states[0, position, columns], torch.from_numpy(state[0]))
