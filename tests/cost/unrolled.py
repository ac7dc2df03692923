"""A plain recurrent cell, step by step: torch's FLOP counter gives 0 for its own `nn.GRU` and `nn.LSTM` on a CPU."""

import torch
from torch import nn
from torch.nn import functional as F


class Unrolled:
    """Answers as the `nn.GRU` or `nn.LSTM` it is made from, by products that can be counted."""

    def __init__(self, recurrence):
        self.recurrence = recurrence
        self.is_lstm = isinstance(recurrence, nn.LSTM)

    def __call__(self, x, state=None):
        n_directions = 2 if self.recurrence.bidirectional else 1
        last = []
        for layer in range(self.recurrence.num_layers):
            found = [self.direction(x, state, layer, way, layer * n_directions + way) for way in range(n_directions)]
            x = torch.cat([states for states, _ in found], dim=-1)
            last += [carried for _, carried in found]
        parts = tuple(torch.stack(part) for part in zip(*last, strict=True))
        return x, parts if self.is_lstm else parts[0]

    def direction(self, x, state, layer, way, index):
        ending = f"_l{layer}" + ("_reverse" if way else "")
        w_in, w_state, b_in, b_state = (
            getattr(self.recurrence, name + ending) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        if state is None:
            carried = (x.new_zeros(x.shape[0], w_state.shape[1]),) * (2 if self.is_lstm else 1)
        else:
            carried = tuple(part[index] for part in (state if self.is_lstm else (state,)))
        inputs, order = F.linear(x, w_in, b_in), range(x.shape[1])
        states = {}
        for t in reversed(order) if way else order:
            carried = self.step(inputs[:, t], F.linear(carried[0], w_state, b_state), carried)
            states[t] = carried[0]
        return torch.stack([states[t] for t in order], dim=1), carried

    def step(self, from_input, from_state, carried):
        if self.is_lstm:
            enter, forget, new, leave = (from_input + from_state).chunk(4, dim=-1)
            cell = forget.sigmoid() * carried[1] + enter.sigmoid() * new.tanh()
            return leave.sigmoid() * cell.tanh(), cell
        (r_in, z_in, n_in), (r, z, n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        reset, update = (r_in + r).sigmoid(), (z_in + z).sigmoid()
        return ((1 - update) * (n_in + reset * n).tanh() + update * carried[0],)


def unroll(model):
    """The same RNN model, its two recurrences in plain steps."""
    for part in (model.encoder, model.decoder):
        part.recurrence.forward = Unrolled(part.recurrence)
    return model
