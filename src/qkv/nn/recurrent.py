"""Recurrent encoder and decoder with attention, the architecture that the Transformer replaced."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv.choices import CellKind, RNNAttentionScore
from qkv.errors import InputError
from qkv.nn.attention import AttentionInputs, masked_softmax
from qkv.nn.cache import LayerSourceCache
from qkv.nn.mask import Mask
from qkv.nn.tap import Tap
from qkv.tensors import AttentionMask, Keys, Residual, Scores, Values
from qkv.utils import autocast_disabled

State = tuple[Float[Tensor, "layer batch d_model"], ...]
"""Recurrent state: (h,) for a GRU and (h, c) for an LSTM."""


def build_recurrence(
    cell: CellKind, d_input: int, d_state: int, *, n_layers: int, bidirectional: bool, dropout: float
) -> nn.GRU | nn.LSTM:
    rnn_class = nn.GRU if cell is CellKind.GRU else nn.LSTM
    return rnn_class(
        d_input,
        d_state,
        n_layers,
        batch_first=True,
        bidirectional=bidirectional,
        # PyTorch warns about dropout with a single layer because it applies dropout only between layers.
        dropout=dropout if n_layers > 1 else 0.0,
    )


def run_recurrence_in_weight_dtype(recurrence: nn.GRU | nn.LSTM, x: Any, state: State | None = None) -> Any:  # noqa: ANN401 - packed or not
    """Run a GRU or LSTM in the precision of its weights, even under autocast.

    On a GPU, autocast runs recurrences in float16 regardless of the autocast dtype, so small gradients underflow to 0.
    """
    weight = next(recurrence.parameters())
    with autocast_disabled(weight.device) as was_enabled:
        if was_enabled:
            x, state = x.to(weight.dtype), None if state is None else tuple(part.to(weight.dtype) for part in state)
        return recurrence(x, state[0] if state is not None and len(state) == 1 else state)


class BidirectionalRecurrentEncoder(nn.Module):
    """Bidirectional recurrent encoder. Each output state concatenates the states of both directions.

    The encoder also computes the decoder's initial state, tanh(W·[forward; backward]), from the last state in each
    direction. Padding tokens are skipped.
    """

    def __init__(
        self, d_model: int, *, cell: CellKind, n_layers: int, n_decoder_layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.recurrence = build_recurrence(
            cell, d_model, d_model // 2, n_layers=n_layers, bidirectional=True, dropout=dropout
        )
        self.n_decoder_layers = n_decoder_layers
        self.bridge = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(1 if cell is CellKind.GRU else 2))
        self.states = Tap()

    def forward(self, x: Residual, attention_mask: AttentionMask | None = None) -> tuple[Residual, State]:
        """Return the encoder states and the decoder's initial state."""
        if attention_mask is None:
            states, last = run_recurrence_in_weight_dtype(self.recurrence, x)
        else:
            lengths = attention_mask.sum(1).cpu()
            if int(lengths.min()) == 0:
                raise InputError(f"row {int(lengths.argmin())} of the source has 0 tokens, expected at least 1")
            x, inverse_order = _align_left(x, attention_mask)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, last = run_recurrence_in_weight_dtype(self.recurrence, packed)
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
            states = states.gather(1, inverse_order[..., None].expand_as(states)) * attention_mask[..., None]
        last = last if isinstance(last, tuple) else (last,)
        initial = tuple(self._initial_state(linear, part) for linear, part in zip(self.bridge, last, strict=True))
        return self.states(states), initial

    def _initial_state(self, linear: nn.Module, last: Tensor) -> Tensor:
        # The last two states are those of the last layer, one for each direction.
        forward, backward = last[-2], last[-1]
        initial = torch.tanh(linear(torch.cat((forward, backward), dim=-1)))
        return initial.expand(self.n_decoder_layers, *initial.shape).contiguous()


def _align_left(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the tokens of each row to the left, and return the permutation that moves them back."""
    order = torch.argsort((~attention_mask).long(), dim=1, stable=True)
    return x.gather(1, order[..., None].expand_as(x)), torch.argsort(order, dim=1)


class StateAttention(nn.Module):
    """Attention from decoder states to encoder states, which serve as values without a projection (lecture C).

    The score functions are dot q·k, general q·Wk (arXiv:1508.04025) and additive v·tanh(Wq + Uk) (arXiv:1409.0473).
    The taps `scores`, `weights` and `head_outputs` match those of `Attention`, with a single head.
    """

    def __init__(self, d_model: int, *, kind: RNNAttentionScore) -> None:
        super().__init__()
        self.kind = kind
        if kind is RNNAttentionScore.GENERAL:
            self.k_proj = nn.Linear(d_model, d_model, bias=False)
        elif kind is RNNAttentionScore.ADDITIVE:
            self.q_proj = nn.Linear(d_model, d_model, bias=False)
            self.k_proj = nn.Linear(d_model, d_model, bias=False)
            self.score_proj = nn.Linear(d_model, 1, bias=False)
        self.scores, self.weights, self.head_outputs = Tap(), Tap(), Tap()

    def forward(
        self,
        queries: Residual,
        encoder_states: Float[Tensor, "source_batch key d_model"],
        *,
        mask: Mask | None = None,
        cache: LayerSourceCache | None = None,
    ) -> Residual:
        """Attend from `queries` to `encoder_states`. A cache avoids computing the keys again after the first step."""
        # Beams of the same source are folded into the query axis, as in `Attention`.
        beams_per_source = queries.shape[0] // encoder_states.shape[0]
        folded = queries.reshape(encoder_states.shape[0], beams_per_source * queries.shape[1], -1)
        source_cache = LayerSourceCache() if cache is None else cache
        keys, _ = source_cache.get_or_compute(lambda: self._keys_values(encoder_states))
        scores = self._compute_scores(folded, keys)
        if mask is not None:
            visible = mask.to_dense(scores.shape[-2], scores.shape[-1], scores.device)
            scores = scores.masked_fill(~visible, float("-inf"))
        outputs = self.head_outputs(self.weights(masked_softmax(self.scores(scores))) @ encoder_states[:, None])
        return outputs[:, 0].reshape(queries.shape)

    def _keys_values(self, states: Tensor) -> tuple[Keys, Values]:
        """Return the keys and values for the single head. The values are the states themselves."""
        keys = states if self.kind is RNNAttentionScore.DOT else self.k_proj(states)
        return keys[:, None], states[:, None]

    def _compute_scores(self, queries: Tensor, keys: Keys) -> Scores:
        if self.kind is RNNAttentionScore.ADDITIVE:
            # Every query is added to every key: (batch, query, 1, width) + (batch, 1, key, width).
            hidden = self.q_proj(queries)[:, :, None] + keys
            return self.score_proj(torch.tanh(hidden)).squeeze(-1)[:, None]
        # `scores` does not read the values, so the keys take their place.
        return AttentionInputs(queries=queries[:, None], keys=keys, values=keys, scale=1.0).scores()


class AttentiveDecoder(nn.Module):
    """Recurrent decoder whose states attend to the encoder states.

    The output is tanh(W·[context; state]) (eq. 5 of arXiv:1508.04025). Attention does not feed back into the
    recurrence, so all target states of a training batch attend in parallel.
    """

    def __init__(
        self, d_model: int, *, cell: CellKind, n_layers: int, kind: RNNAttentionScore, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.recurrence = build_recurrence(
            cell, d_model, d_model, n_layers=n_layers, bidirectional=False, dropout=dropout
        )
        self.attention = None if kind is RNNAttentionScore.NONE else StateAttention(d_model, kind=kind)
        self.combine = None if kind is RNNAttentionScore.NONE else nn.Linear(2 * d_model, d_model)
        self.states = Tap()

    def forward(
        self,
        x: Residual,
        state: State,
        *,
        source: Float[Tensor, "source_batch key d_model"],
        mask: Mask | None = None,
        cache: LayerSourceCache | None = None,
    ) -> tuple[Residual, State]:
        """Return the decoder outputs, and the recurrent state after the last position."""
        # A recurrence computes its states one after the other. This is the loop that a Transformer avoids.
        states, last = run_recurrence_in_weight_dtype(self.recurrence, x, state)
        states = self.states(states)
        if self.attention is not None and self.combine is not None:
            context = self.attention(states, source, mask=mask, cache=cache)
            states = torch.tanh(self.combine(torch.cat((context, states), dim=-1)))
        return states, last if isinstance(last, tuple) else (last,)
