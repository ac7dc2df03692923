"""Unrolled GRU and LSTM, because torch's FLOP counter reports 0 for `nn.GRU` and `nn.LSTM` on a CPU."""

import torch
from torch import nn
from torch.nn import functional as F


class UnrolledRNN:
    """Computes the same outputs as an `nn.GRU` or `nn.LSTM`, with matmuls that the FLOP counter sees."""

    def __init__(self, recurrence):
        self.recurrence = recurrence
        self.is_lstm = isinstance(recurrence, nn.LSTM)

    def __call__(self, x, state=None):
        n_directions = 2 if self.recurrence.bidirectional else 1
        final_states = []
        for layer in range(self.recurrence.num_layers):
            outputs = [
                self.run_direction(x, state, layer, direction, layer * n_directions + direction)
                for direction in range(n_directions)
            ]
            x = torch.cat([states for states, _ in outputs], dim=-1)
            final_states += [state for _, state in outputs]
        parts = tuple(torch.stack(part) for part in zip(*final_states, strict=True))
        return x, parts if self.is_lstm else parts[0]

    def run_direction(self, x, state, layer, direction, index):
        suffix = f"_l{layer}" + ("_reverse" if direction else "")
        w_in, w_state, b_in, b_state = (
            getattr(self.recurrence, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        if state is None:
            hidden = (x.new_zeros(x.shape[0], w_state.shape[1]),) * (2 if self.is_lstm else 1)
        else:
            hidden = tuple(part[index] for part in (state if self.is_lstm else (state,)))
        inputs, order = F.linear(x, w_in, b_in), range(x.shape[1])
        states = {}
        for t in reversed(order) if direction else order:
            hidden = self.step(inputs[:, t], F.linear(hidden[0], w_state, b_state), hidden)
            states[t] = hidden[0]
        return torch.stack([states[t] for t in order], dim=1), hidden

    def step(self, from_input, from_state, hidden):
        if self.is_lstm:
            input_gate, forget_gate, candidate, output_gate = (from_input + from_state).chunk(4, dim=-1)
            cell = forget_gate.sigmoid() * hidden[1] + input_gate.sigmoid() * candidate.tanh()
            return output_gate.sigmoid() * cell.tanh(), cell
        (r_in, z_in, n_in), (r, z, n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        reset, update = (r_in + r).sigmoid(), (z_in + z).sigmoid()
        return ((1 - update) * (n_in + reset * n).tanh() + update * hidden[0],)


def unroll(model):
    """Replace the recurrences of an RNN model with unrolled ones."""
    for part in (model.encoder, model.decoder):
        part.recurrence.forward = UnrolledRNN(part.recurrence)
    return model
