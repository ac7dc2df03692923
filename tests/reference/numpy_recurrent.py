"""NumPy reference of the RNN encoder–decoder, in float64, one sequence and one step at a time.

It shares no code with the library. Configs are plain dicts, and weights are dicts of arrays.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Settings = Mapping[str, Any]
Weights = Mapping[str, Array]
State = tuple[Array, Array]
"""h and c of one layer. A GRU does not use c."""


def rnn_seq2seq(s: Settings, w: Weights, source_ids: Array, ids: Array, *, source_attention_mask: Array | None = None):
    """Returns the logits of the target, (batch, position, vocabulary)."""
    rows = []
    for b in range(len(ids)):
        real = np.ones(len(source_ids[b]), bool) if source_attention_mask is None else source_attention_mask[b]
        x = w["source_embedding.weight"][source_ids[b][real]]
        states, first = _encode(s, w, x)
        x = w["embedding.weight"][ids[b]]
        for layer in range(s["n_decoder_layers"]):
            x = _run(s, w, f"decoder.recurrence.{{}}_l{layer}", x, first)[0]
        if s["attention"] != "none":
            x = np.stack([_attend(s, w, state, states) for state in x])
        table = w["embedding.weight" if s["tie_embeddings"] else "unembedding.weight"]
        rows.append(x @ table.T + w["unembedding.bias"])
    return np.stack(rows)


def _encode(s: Settings, w: Weights, x: Array) -> tuple[Array, State]:
    """Returns the states of both directions and the initial decoder state."""
    zero = np.zeros(s["d_model"] // 2)
    for layer in range(s["n_encoder_layers"]):
        name = f"encoder.recurrence.{{}}_l{layer}"
        there, last_there = _run(s, w, name, x, (zero, zero))
        back, last_back = _run(s, w, f"{name}_reverse", x[::-1], (zero, zero))
        x = np.concatenate([there, back[::-1]], axis=1)
    first = [np.zeros(s["d_model"])] * 2
    for part in range(2 if s["cell"] == "lstm" else 1):
        joined = np.concatenate([last_there[part], last_back[part]])
        first[part] = np.tanh(w[f"encoder.bridge.{part}.weight"] @ joined + w[f"encoder.bridge.{part}.bias"])
    return x, (first[0], first[1])


def _run(s: Settings, w: Weights, name: str, x: Array, state: State) -> tuple[Array, State]:
    """Run one layer. `name` has a placeholder for weight_ih, weight_hh, bias_ih and bias_hh."""
    step = gru_step if s["cell"] == "gru" else lstm_step
    weights = [w[name.format(part)] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    states = []
    for row in x:
        state = step(row, state, *weights)
        states.append(state[0])
    return np.stack(states), state


def gru_step(x: Array, state: State, w_x: Array, w_h: Array, b_x: Array, b_h: Array) -> State:
    """One GRU step (arXiv:1406.1078, with the reset gate applied after the hidden bias)."""
    h, c = state
    reset_x, update_x, new_x = np.split(w_x @ x + b_x, 3)
    reset_h, update_h, new_h = np.split(w_h @ h + b_h, 3)
    reset, update = _sigmoid(reset_x + reset_h), _sigmoid(update_x + update_h)
    new = np.tanh(new_x + reset * new_h)
    return (1 - update) * new + update * h, c


def lstm_step(x: Array, state: State, w_x: Array, w_h: Array, b_x: Array, b_h: Array) -> State:
    """One LSTM step with input gate, forget gate, candidate and output gate."""
    h, c = state
    let_in, forget, new, let_out = np.split(w_x @ x + b_x + w_h @ h + b_h, 4)
    c = _sigmoid(forget) * c + _sigmoid(let_in) * np.tanh(new)
    return _sigmoid(let_out) * np.tanh(c), c


def _attend(s: Settings, w: Weights, state: Array, states: Array) -> Array:
    match s["attention"]:
        case "dot":
            scores = np.array([state @ key for key in states])
        case "general":
            scores = np.array([state @ w["decoder.attention.k_proj.weight"] @ key for key in states])
        case "additive":
            of_query = w["decoder.attention.q_proj.weight"] @ state
            of_key = w["decoder.attention.k_proj.weight"]
            v = w["decoder.attention.score_proj.weight"][0]
            scores = np.array([v @ np.tanh(of_query + of_key @ key) for key in states])
    weights = np.exp(scores - scores.max())
    context = (weights / weights.sum()) @ states
    return np.tanh(w["decoder.combine.weight"] @ np.concatenate([context, state]) + w["decoder.combine.bias"])


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
