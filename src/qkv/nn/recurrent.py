"""What the Transformer replaced: recurrent encoder and decoder, and attention between them."""

from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv.choices import CellKind, ScoreKind
from qkv.errors import InputError
from qkv.nn.cache import SourceCache
from qkv.nn.lookup import Lookup, weights_of
from qkv.nn.mask import Mask
from qkv.nn.tap import Tap
from qkv.tensors import IsToken, Keys, Residual, Scores, Values

State = tuple[Float[Tensor, "layer batch d_model"], ...]
"""What a recurrence carries from one step to the next: (h,) for a GRU, (h, c) for an LSTM."""


def recurrence(
    cell: CellKind, width: int, d_state: int, *, n_layers: int, bidirectional: bool, dropout: float
) -> nn.GRU | nn.LSTM:
    kind = nn.GRU if cell is CellKind.GRU else nn.LSTM
    return kind(
        width,
        d_state,
        n_layers,
        batch_first=True,
        bidirectional=bidirectional,
        dropout=dropout if n_layers > 1 else 0.0,
    )


def run(recurrence: nn.GRU | nn.LSTM, x: Any, state: State | None = None) -> Any:  # noqa: ANN401 - packed or not
    """In the weights' own precision, autocast or not.

    torch's autocast takes a GPU's recurrence down to float16, whatever it was asked for; there small gradients are 0.
    """
    weight = next(recurrence.parameters())
    device = weight.device.type
    is_casting = device != "meta" and torch.is_autocast_enabled(device)
    if is_casting:
        x, state = x.to(weight.dtype), None if state is None else tuple(part.to(weight.dtype) for part in state)
    is_exact = device == "cuda" and not recurrence.training
    with (
        torch.autocast(device, enabled=False) if is_casting else nullcontext(),
        _EXACT if is_exact else nullcontext(),
    ):
        return recurrence(x, state[0] if state is not None and len(state) == 1 else state)


class _Exact:
    """cuDNN multiplies float32 with 10 bits of its 23 unless told not to: answers would differ in the fourth digit.

    The switch is one for all threads: who comes first turns it, who leaves last turns it back.
    """

    def __init__(self) -> None:
        self._lock, self._n_inside, self._before = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._before = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                torch.backends.cudnn.allow_tf32 = self._before


_EXACT = _Exact()


class RecurrentEncoder(nn.Module):
    """Reads the source in both directions; a state is both directions' halves side by side.

    Also gives the decoder its first state: the last state of either direction, joined, through tanh(W·).
    Padding is never read.
    """

    def __init__(
        self, d_model: int, *, cell: CellKind, n_layers: int, n_decoder_layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.recurrence = recurrence(
            cell, d_model, d_model // 2, n_layers=n_layers, bidirectional=True, dropout=dropout
        )
        self.n_decoder_layers = n_decoder_layers
        self.bridge = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(1 if cell is CellKind.GRU else 2))
        self.states = Tap()

    def forward(self, x: Residual, attention_mask: IsToken | None = None) -> tuple[Residual, State]:
        if attention_mask is None:
            states, last = run(self.recurrence, x)
        else:
            lengths = attention_mask.sum(1).cpu()
            if int(lengths.min()) == 0:
                raise InputError(f"row {int(lengths.argmin())} of the source has 0 tokens, there must be at least 1")
            x, order_back = _left_aligned(x, attention_mask)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, last = run(self.recurrence, packed)
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
            states = states.gather(1, order_back[..., None].expand_as(states)) * attention_mask[..., None]
        last = last if isinstance(last, tuple) else (last,)
        first = tuple(self._bridged(linear, part) for linear, part in zip(self.bridge, last, strict=True))
        return self.states(states), first

    def _bridged(self, linear: nn.Module, last: Tensor) -> Tensor:
        forward, backward = last[-2], last[-1]
        start = torch.tanh(linear(torch.cat((forward, backward), dim=-1)))
        return start.expand(self.n_decoder_layers, *start.shape).contiguous()


def _left_aligned(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens moved to the left of each row, and where each position went."""
    order = torch.argsort((~attention_mask).long(), dim=1, stable=True)
    return x.gather(1, order[..., None].expand_as(x)), torch.argsort(order, dim=1)


class StateAttention(nn.Module):
    """A decoder's states look at an encoder's: raw keys = values = encoder states (lecture C).

    dot: q·k · general: q·Wk (arXiv:1508.04025) · additive: v·tanh(Wq + Uk) (arXiv:1409.0473).
    Taps as in `Attention`: `scores`, `weights`, `heads`; there is one head.
    """

    def __init__(self, d_model: int, *, kind: ScoreKind) -> None:
        super().__init__()
        self.kind = kind
        if kind is ScoreKind.GENERAL:
            self.key = nn.Linear(d_model, d_model, bias=False)
        elif kind is ScoreKind.ADDITIVE:
            self.query = nn.Linear(d_model, d_model, bias=False)
            self.key = nn.Linear(d_model, d_model, bias=False)
            self.similarity = nn.Linear(d_model, 1, bias=False)
        self.scores, self.weights, self.heads = Tap(), Tap(), Tap()

    def forward(
        self,
        queries: Residual,
        states: Float[Tensor, "source_batch key d_model"],
        *,
        mask: Mask | None = None,
        cache: SourceCache | None = None,
    ) -> Residual:
        """With a cache the source's projection is computed at the first step and kept."""
        n_shared = queries.shape[0] // states.shape[0]
        folded = queries.reshape(states.shape[0], n_shared * queries.shape[1], -1)
        keys = self._keys(states)[0] if cache is None else cache.fetch(lambda: self._keys(states))[0]
        scores = self._scores(folded, keys)
        if mask is not None:
            scores = scores.masked_fill(~mask.visible(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))
        mixed = self.heads(self.weights(weights_of(self.scores(scores))) @ states[:, None])
        return mixed[:, 0].reshape(queries.shape)

    def _keys(self, states: Tensor) -> tuple[Keys, Values]:
        """Of one head; the values are the states themselves."""
        keys = states if self.kind is ScoreKind.DOT else self.key(states)
        return keys[:, None], states[:, None]

    def _scores(self, queries: Tensor, keys: Keys) -> Scores:
        if self.kind is ScoreKind.ADDITIVE:
            both = self.query(queries)[:, :, None] + keys
            return self.similarity(torch.tanh(both)).squeeze(-1)[:, None]
        return Lookup(queries=queries[:, None], keys=keys, values=keys, scale=1.0).scores()


class AttentiveDecoder(nn.Module):
    """A recurrence over the target; each of its states looks at the source, and state and answer are joined.

    tanh(W[context; state]), eq. 5 of arXiv:1508.04025. All target states of a training batch look at once.
    """

    def __init__(self, d_model: int, *, cell: CellKind, n_layers: int, kind: ScoreKind, dropout: float = 0.0) -> None:
        super().__init__()
        self.recurrence = recurrence(cell, d_model, d_model, n_layers=n_layers, bidirectional=False, dropout=dropout)
        self.attention = None if kind is ScoreKind.NONE else StateAttention(d_model, kind=kind)
        self.combine = None if kind is ScoreKind.NONE else nn.Linear(2 * d_model, d_model)
        self.states = Tap()

    def forward(
        self,
        x: Residual,
        state: State,
        *,
        source: Float[Tensor, "source_batch key d_model"],
        mask: Mask | None = None,
        cache: SourceCache | None = None,
    ) -> tuple[Residual, State]:
        states, last = run(self.recurrence, x, state)
        states = self.states(states)
        if self.attention is not None and self.combine is not None:
            context = self.attention(states, source, mask=mask, cache=cache)
            states = torch.tanh(self.combine(torch.cat((context, states), dim=-1)))
        return states, last if isinstance(last, tuple) else (last,)
