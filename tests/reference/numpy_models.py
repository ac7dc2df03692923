"""NumPy reference of the Transformer families, in float64 and one head at a time.

It shares no code with the library. Configs are plain dicts, and weights are dicts of arrays.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from tests.reference.numpy_positions import bucket, rotate, sinusoid, slopes

Array = np.ndarray
Settings = Mapping[str, Any]
Weights = Mapping[str, Array]


def gpt(s: Settings, w: Weights, ids: Array, *, attention_mask: Array | None = None, documents: Array | None = None):
    """Returns the logits, (batch, position, vocabulary)."""
    rows = []
    for b in range(len(ids)):
        is_token, row_documents = _row(attention_mask, b), _row(documents, b)
        positions = _position_ids(len(ids[b]), is_token, row_documents)
        visible = _visible(
            positions, causal=s["causal"], window=s["sliding_window"], is_token=is_token, documents=row_documents
        )
        x = _embed(s, w, "embedding", ids[b], positions)
        x = _stack(s, w, "", x, visible=visible, positions=positions, is_bidirectional=not s["causal"])
        rows.append(_unembed(s, w, x, tied="embedding.token.weight"))
    return np.stack(rows)


def bert(
    s: Settings,
    w: Weights,
    ids: Array,
    *,
    segments: Array | None = None,
    attention_mask: Array | None = None,
    documents: Array | None = None,
) -> dict[str, Array]:
    """Returns the hidden states and the output of each head that the settings enable."""
    rows = []
    for b in range(len(ids)):
        is_token, row_documents = _row(attention_mask, b), _row(documents, b)
        positions = _position_ids(len(ids[b]), is_token, row_documents)
        of = np.zeros(len(ids[b]), int) if segments is None else segments[b]
        of = of if s["n_segments"] else None
        x = _embed(s, w, "embedding", ids[b], positions, segments=of)
        visible = _visible(
            positions, causal=False, window=s["sliding_window"], is_token=is_token, documents=row_documents
        )
        rows.append(_stack(s, w, "", x, visible=visible, positions=positions, is_bidirectional=True))
    states = np.stack(rows)
    out = {"states": states}
    if s["pooler"]:
        dense = _linear(w, "pooler", states[:, 0])
        out["pooled"] = np.tanh(dense) if s["pooler_activation"] == "tanh" else np.maximum(dense, 0)
    if s["next_sentence_head"]:
        out["next_sentence"] = _linear(w, "next_sentence", out["pooled"])
    if s["n_classes"] is not None:
        out["classes"] = _linear(w, "classifier", out["pooled"])
    if s["masked_lm_head"]:
        hidden = _activation(s["activation"], _linear(w, "masked_lm.dense", states))
        hidden = _norm(s, w, "masked_lm.norm", hidden)
        out["masked_lm"] = _unembed(s, w, hidden, tied="embedding.token.weight", prefix="masked_lm.")
    return out


def seq2seq(
    s: Settings,
    w: Weights,
    source_input: Array,
    ids: Array,
    *,
    source_attention_mask: Array | None = None,
    attention_mask: Array | None = None,
):
    """Logits of the target, (batch, position, vocabulary). `source_input` holds ids or patches."""
    rows = []
    for b in range(len(ids)):
        is_token, n = _row(source_attention_mask, b), len(source_input[b])
        positions = _position_ids(n, is_token, None)
        x = _embed(s, w, "encoder.embedding", source_input[b], positions)
        visible = _visible(positions, causal=False, window=s["sliding_window"], is_token=is_token)
        source = _stack(s, w, "encoder.", x, visible=visible, positions=positions, is_bidirectional=True)
        source_real = np.ones(n, bool) if is_token is None else is_token

        is_token, n = _row(attention_mask, b), len(ids[b])
        positions = _position_ids(n, is_token, None)
        x = _embed(s, w, "decoder.embedding", ids[b], positions)
        visible = _visible(positions, causal=True, window=s["sliding_window"], is_token=is_token)
        x = _stack(
            s, w, "decoder.", x, visible=visible, positions=positions, is_bidirectional=False,
            source=(source, np.tile(source_real, (n, 1))),
        )  # fmt: skip
        rows.append(_unembed(s, w, x, tied="decoder.embedding.token.weight"))
    return np.stack(rows)


def _row(table: Array | None, b: int) -> Array | None:
    return None if table is None else table[b]


def _position_ids(n: int, is_token: Array | None, documents: Array | None) -> list[int]:
    """Returns the number of earlier tokens of the same document for each token, not counting padding."""
    positions, before = [], 0
    for j in range(n):
        if documents is not None and j > 0 and documents[j] != documents[j - 1]:
            before = 0
        positions.append(before)
        before += 1 if is_token is None else int(is_token[j])
    return positions


def _visible(
    positions: list[int], *, causal: bool, window: int | None, is_token: Array | None, documents: Array | None = None
):
    """Returns the mask as [query, key], decided for one pair at a time. A sliding window counts only tokens."""

    def is_visible(query: int, key: int) -> bool:
        return (
            (not causal or key <= query)
            and (window is None or abs(positions[query] - positions[key]) < window)
            and (is_token is None or bool(is_token[key]))
            and (documents is None or documents[query] == documents[key])
        )

    n = len(positions)
    return np.array([[is_visible(query, key) for key in range(n)] for query in range(n)])


def _embed(s: Settings, w: Weights, name: str, ids: Array, positions: list[int], segments: Array | None = None):
    d, table = s["d_model"], w[f"{name}.token.weight"]
    x = table[ids] if ids.ndim == 1 else ids @ table
    if s["scale_embedding"]:
        x = x * math.sqrt(d)
    if segments is not None:
        x = x + w[f"{name}.segment.weight"][segments]
    if s["positions"] == "learned":
        x = x + w[f"{name}.position.table.weight"][np.array(positions) + s["position_offset"]]
    if s["positions"] == "sinusoidal":
        x = x + np.array([sinusoid(position, d, s["sinusoid"]) for position in positions])
    if s["positions"] == "concatenated":
        both = np.concatenate([x, [sinusoid(position, d, s["sinusoid"]) for position in positions]], axis=1)
        x = both @ w[f"{name}.position.project.weight"].T
    return _norm(s, w, f"{name}.norm", x) if s["embedding_norm"] else x


def _stack(
    s: Settings, w: Weights, prefix: str, x: Array, *, visible: Array, positions: list[int], is_bidirectional: bool,
    source: tuple[Array, Array] | None = None,
):  # fmt: skip
    """Run all blocks and the final norm. `source` holds the states for cross-attention and their mask."""
    is_pre = s["norm_position"] == "pre"
    bias = _distance_bias(s, w, f"{prefix}relative_positions", positions, is_bidirectional=is_bidirectional)
    rotary_positions = positions if s["positions"] == "rotary" else None

    def add(x: Array, norm: str, sublayer):
        return x + sublayer(_norm(s, w, norm, x)) if is_pre else _norm(s, w, norm, x + sublayer(x))

    n_layers = s[{"": "n_layers", "encoder.": "n_encoder_layers", "decoder.": "n_decoder_layers"}[prefix]]
    for name in (f"{prefix}blocks.{i}" for i in range(n_layers)):
        attention = partial(
            _attention, s, w, f"{name}.attention", visible=visible, bias=bias, rotary_positions=rotary_positions
        )
        x = add(x, f"{name}.attention_norm", attention)
        if source is not None:
            cross = partial(_attention, s, w, f"{name}.cross_attention", source=source[0], visible=source[1])
            x = add(x, f"{name}.cross_attention_norm", cross)
        x = add(x, f"{name}.feed_forward_norm", partial(_feed_forward, s, w, f"{name}.feed_forward"))
    return _norm(s, w, f"{prefix}final_norm", x) if s["final_norm"] else x


def _attention(
    s: Settings, w: Weights, name: str, x: Array, *, visible: Array, source=None, bias=None, rotary_positions=None
) -> Array:
    source = x if source is None else source
    h, d_head, d_value = s["n_heads"], s["d_head"], s["d_value"]
    results = []
    for head in range(h):
        kv_head = head * s["n_kv_heads"] // h
        q = _project_head(s, w, f"{name}.q_proj", x, head, d_head)
        k = _project_head(s, w, f"{name}.k_proj", source, kv_head, d_head)
        v = _project_head(s, w, f"{name}.v_proj", source, kv_head, d_value)
        if rotary_positions is not None:
            q, k = rotate(s, q, rotary_positions), rotate(s, k, rotary_positions)
        scores = q @ k.T / (math.sqrt(d_head) if s["scale_scores"] else 1.0)
        if bias is not None:
            scores = scores + bias[head]
        results.append(_softmax(scores, visible) @ v)
    match s["head_combination"]:
        case "split":
            mixed = np.concatenate(results, axis=1)
        case "pooled":
            mixed = sum(results)
        case "pooled-mean":
            mixed = sum(results) / h
    return _linear(w, f"{name}.out_proj", mixed, bias=s["attention_bias"]) if s["output_projection"] else mixed


def _project_head(s: Settings, w: Weights, name: str, x: Array, head: int, width: int) -> Array:
    rows = slice(head * width, (head + 1) * width)
    out = x @ w[f"{name}.weight"][rows].T
    return out + w[f"{name}.bias"][rows] if s["attention_bias"] else out


def _softmax(scores: Array, visible: Array) -> Array:
    weights = np.zeros_like(scores)
    for row in range(len(scores)):
        keys = visible[row]
        if keys.any():
            powers = np.exp(scores[row, keys] - scores[row, keys].max())
            weights[row, keys] = powers / powers.sum()
    return weights


def _distance_bias(s: Settings, w: Weights, name: str, positions: list[int], *, is_bidirectional: bool):
    """Returns a bias of shape (head, query, key), or None for other kinds of positions."""
    ahead = np.subtract.outer(positions, positions).T
    if s["positions"] == "alibi":
        return np.array([-slope * abs(ahead) for slope in slopes(s["n_heads"])])
    if s["positions"] == "relative":
        numbers = [[bucket(s, int(a), is_bidirectional=is_bidirectional) for a in row] for row in ahead]
        return w[f"{name}.table.weight"][np.array(numbers)].transpose(2, 0, 1)
    return None


def _norm(s: Settings, w: Weights, name: str, x: Array) -> Array:
    if s["norm"] == "rms":
        size = np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + s["norm_eps"])
        return x / size * w[f"{name}.weight"]
    assert s["norm"] == "layer"
    centred = x - x.sum(-1, keepdims=True) / x.shape[-1]
    size = np.sqrt((centred**2).sum(-1, keepdims=True) / x.shape[-1] + s["norm_eps"])
    out = centred / size * w[f"{name}.weight"]
    return out + w[f"{name}.bias"] if s["norm_bias"] else out


def _feed_forward(s: Settings, w: Weights, name: str, x: Array) -> Array:
    bias = s["feed_forward_bias"]
    hidden = _linear(w, f"{name}.up_proj", x, bias=bias)
    if s["gated"]:
        hidden = hidden * _activation(s["activation"], _linear(w, f"{name}.gate_proj", x, bias=bias))
    else:
        hidden = _activation(s["activation"], hidden)
    return _linear(w, f"{name}.down_proj", hidden, bias=bias)


def _activation(kind: str, x: Array) -> Array:
    match kind:
        case "relu":
            return np.where(x > 0, x, 0.0)
        case "gelu":
            return x * np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[float])(x)
        case "gelu-tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "silu":
            return x / (1 + np.exp(-x))
    raise ValueError(kind)


def _linear(w: Weights, name: str, x: Array, *, bias: bool = True) -> Array:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if bias else out


def _unembed(s: Settings, w: Weights, x: Array, *, tied: str, prefix: str = "") -> Array:
    table = w[tied if s["tie_embeddings"] else f"{prefix}unembedding.weight"]
    logits = (x / math.sqrt(s["d_model"]) if s["scale_logits"] else x) @ table.T
    return logits + w[f"{prefix}unembedding.bias"] if s["unembedding_bias"] else logits
