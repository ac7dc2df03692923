"""What the Transformer families compute, from the mathematics alone: float64 NumPy, one head at a time.

Shares no code with the library. Takes a config as a plain dict of settings, weights as a dict of arrays.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from tests.reference.numpy_positions import bucket, sinusoid, slopes, turn

Array = np.ndarray
Settings = Mapping[str, Any]
Weights = Mapping[str, Array]


def gpt(s: Settings, w: Weights, ids: Array, *, attention_mask: Array | None = None, documents: Array | None = None):
    """Logits, (batch, position, vocabulary)."""
    rows = []
    for b in range(len(ids)):
        real, texts = _row(attention_mask, b), _row(documents, b)
        places = _places(len(ids[b]), real, texts)
        visible = _visible(places, causal=s["causal"], window=s["sliding_window"], real=real, texts=texts)
        x = _embed(s, w, "embedding", ids[b], places)
        x = _stack(s, w, "", x, visible=visible, places=places, is_bidirectional=not s["causal"])
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
    """Every state, and what each head that the settings ask for makes of them."""
    rows = []
    for b in range(len(ids)):
        real, texts = _row(attention_mask, b), _row(documents, b)
        places = _places(len(ids[b]), real, texts)
        of = np.zeros(len(ids[b]), int) if segments is None else segments[b]
        of = of if s["n_segments"] else None
        x = _embed(s, w, "embedding", ids[b], places, segments=of)
        visible = _visible(places, causal=False, window=s["sliding_window"], real=real, texts=texts)
        rows.append(_stack(s, w, "", x, visible=visible, places=places, is_bidirectional=True))
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
    given: Array,
    ids: Array,
    *,
    source_attention_mask: Array | None = None,
    attention_mask: Array | None = None,
):
    """Logits of the target, (batch, position, vocabulary). `given`: the source's ids, or its patches' numbers."""
    rows = []
    for b in range(len(ids)):
        real, n = _row(source_attention_mask, b), len(given[b])
        places = _places(n, real, None)
        x = _embed(s, w, "encoder.embedding", given[b], places)
        visible = _visible(places, causal=False, window=s["sliding_window"], real=real)
        source = _stack(s, w, "encoder.", x, visible=visible, places=places, is_bidirectional=True)
        source_real = np.ones(n, bool) if real is None else real

        real, n = _row(attention_mask, b), len(ids[b])
        places = _places(n, real, None)
        x = _embed(s, w, "decoder.embedding", ids[b], places)
        visible = _visible(places, causal=True, window=s["sliding_window"], real=real)
        x = _stack(
            s, w, "decoder.", x, visible=visible, places=places, is_bidirectional=False,
            source=(source, np.tile(source_real, (n, 1))),
        )  # fmt: skip
        rows.append(_unembed(s, w, x, tied="decoder.embedding.token.weight"))
    return np.stack(rows)


def _row(table: Array | None, b: int) -> Array | None:
    return None if table is None else table[b]


def _places(n: int, real: Array | None, texts: Array | None) -> list[int]:
    """How many tokens of the same text stand before; padding is none."""
    places, before = [], 0
    for j in range(n):
        if texts is not None and j > 0 and texts[j] != texts[j - 1]:
            before = 0
        places.append(before)
        before += 1 if real is None else int(real[j])
    return places


def _visible(places: list[int], *, causal: bool, window: int | None, real: Array | None, texts: Array | None = None):
    """[query, key]: may it look? Written as one question about one pair at a time; a window counts tokens."""

    def may_look(query: int, key: int) -> bool:
        return (
            (not causal or key <= query)
            and (window is None or abs(places[query] - places[key]) < window)
            and (real is None or bool(real[key]))
            and (texts is None or texts[query] == texts[key])
        )

    n = len(places)
    return np.array([[may_look(query, key) for key in range(n)] for query in range(n)])


def _embed(s: Settings, w: Weights, name: str, ids: Array, places: list[int], segments: Array | None = None):
    d, table = s["d_model"], w[f"{name}.token.weight"]
    x = table[ids] if ids.ndim == 1 else ids @ table
    if s["scale_embedding"]:
        x = x * math.sqrt(d)
    if segments is not None:
        x = x + w[f"{name}.segment.weight"][segments]
    if s["positions"] == "learned":
        x = x + w[f"{name}.position.table.weight"][np.array(places) + s["position_offset"]]
    if s["positions"] == "sinusoidal":
        x = x + np.array([sinusoid(place, d, s["sinusoid"]) for place in places])
    if s["positions"] == "concatenated":
        both = np.concatenate([x, [sinusoid(place, d, s["sinusoid"]) for place in places]], axis=1)
        x = both @ w[f"{name}.position.project.weight"].T
    return _norm(s, w, f"{name}.norm", x) if s["embedding_norm"] else x


def _stack(
    s: Settings, w: Weights, prefix: str, x: Array, *, visible: Array, places: list[int], is_bidirectional: bool,
    source: tuple[Array, Array] | None = None,
):  # fmt: skip
    """All blocks and the last norm; `source`: what cross-attention reads, and who may look at it."""
    is_pre = s["norm_position"] == "pre"
    bias = _distance_bias(s, w, f"{prefix}relative_positions", places, is_bidirectional=is_bidirectional)
    turning = places if s["positions"] == "rotary" else None

    def add(x: Array, norm: str, sublayer):
        return x + sublayer(_norm(s, w, norm, x)) if is_pre else _norm(s, w, norm, x + sublayer(x))

    n_layers = s[{"": "n_layers", "encoder.": "n_encoder_layers", "decoder.": "n_decoder_layers"}[prefix]]
    for name in (f"{prefix}blocks.{i}" for i in range(n_layers)):
        own = partial(_attention, s, w, f"{name}.attention", visible=visible, bias=bias, turning=turning)
        x = add(x, f"{name}.attention_norm", own)
        if source is not None:
            cross = partial(_attention, s, w, f"{name}.cross_attention", source=source[0], visible=source[1])
            x = add(x, f"{name}.cross_attention_norm", cross)
        x = add(x, f"{name}.feed_forward_norm", partial(_feed_forward, s, w, f"{name}.feed_forward"))
    return _norm(s, w, f"{prefix}final_norm", x) if s["final_norm"] else x


def _attention(
    s: Settings, w: Weights, name: str, x: Array, *, visible: Array, source=None, bias=None, turning=None
) -> Array:
    source = x if source is None else source
    h, d_head, d_value = s["n_heads"], s["d_head"], s["d_value"]
    results = []
    for head in range(h):
        kv_head = head * s["n_kv_heads"] // h
        q = _one_head(s, w, f"{name}.q_proj", x, head, d_head)
        k = _one_head(s, w, f"{name}.k_proj", source, kv_head, d_head)
        v = _one_head(s, w, f"{name}.v_proj", source, kv_head, d_value)
        if turning is not None:
            q, k = turn(s, q, turning), turn(s, k, turning)
        scores = q @ k.T / (math.sqrt(d_head) if s["scale_scores"] else 1.0)
        if bias is not None:
            scores = scores + bias[head]
        results.append(_softmax(scores, visible) @ v)
    match s["head_layout"]:
        case "split":
            mixed = np.concatenate(results, axis=1)
        case "pooled":
            mixed = sum(results)
        case "pooled-mean":
            mixed = sum(results) / h
    return _linear(w, f"{name}.out_proj", mixed, bias=s["attention_bias"]) if s["output_projection"] else mixed


def _one_head(s: Settings, w: Weights, name: str, x: Array, head: int, width: int) -> Array:
    own = slice(head * width, (head + 1) * width)
    out = x @ w[f"{name}.weight"][own].T
    return out + w[f"{name}.bias"][own] if s["attention_bias"] else out


def _softmax(scores: Array, visible: Array) -> Array:
    weights = np.zeros_like(scores)
    for row in range(len(scores)):
        seen = visible[row]
        if seen.any():
            powers = np.exp(scores[row, seen] - scores[row, seen].max())
            weights[row, seen] = powers / powers.sum()
    return weights


def _distance_bias(s: Settings, w: Weights, name: str, places: list[int], *, is_bidirectional: bool):
    """(head, query, key), or None where the positions come in elsewhere."""
    ahead = np.subtract.outer(places, places).T
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
            return x * np.vectorize(lambda one: 0.5 * math.erfc(-one / math.sqrt(2)), otypes=[float])(x)
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
