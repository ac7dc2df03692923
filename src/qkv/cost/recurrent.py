"""What an RNN with attention computes, operation by operation.

Kept for backward: as torch's own cells do on a CPU, measured.
"""

from dataclasses import replace

from qkv.choices import CellKind, ScoreKind
from qkv.config import RNNConfig
from qkv.cost.blocks import SOFTMAX
from qkv.cost.operation import Kept, Operation, Product, linear, logits, table
from qkv.cost.workload import Mode, Workload

GATES = {CellKind.GRU: 3, CellKind.LSTM: 4}
STATES = {CellKind.GRU: 1, CellKind.LSTM: 2}
# Numbers kept a step, for each number of the state: encoder's (a reversed LSTM copies more), decoder's.
KEPT = {CellKind.GRU: (8, 8), CellKind.LSTM: (24, 17)}
PROJECTED = (ScoreKind.GENERAL, ScoreKind.ADDITIVE)
"""Attentions that make keys of the source's states."""
PER_GATE = 4  # add the two products and the bias, then sigmoid or tanh
TANH = 1


def rnn_operations(config: RNNConfig, work: Workload) -> list[Operation]:
    d, v, rows = config.d_model, config.vocab_size, work.n_tokens
    decoder = [
        replace(
            table("embedding", "look-up", rows=rows, n_entries=v, width=d), kept=Kept(numbers=rows * d)
        ),
        *_recurrence(
            config, "decoder.recurrence", batch=work.batch, steps=work.n_new, d_state=d,
            copies=config.n_decoder_layers, starts_at_zero=False,
        ),
        *_attention(config, work),
        logits("unembedding", rows=work.n_predicted, d_model=d, n_words=v, is_tied=config.tie_embeddings, bias=True),
    ]  # fmt: skip
    return decoder if work.mode is Mode.DECODE else [*_encoder(config, work), *decoder]


def _encoder(config: RNNConfig, work: Workload) -> list[Operation]:
    d, rows = config.d_model, work.batch * work.n_source
    return [
        replace(
            table("source_embedding", "look-up", rows=rows, n_entries=config.source_vocab_size, width=d),
            kept=Kept(numbers=rows * d),
        ),
        *_recurrence(
            config, "encoder.recurrence", batch=work.batch, steps=work.n_source, d_state=d // 2,
            copies=2 * config.n_encoder_layers, starts_at_zero=True,
        ),
        linear(
            "encoder.bridge", "project", rows=work.batch, d_in=d, d_out=d, bias=True, copies=STATES[config.cell],
            kept=Kept(numbers=2 * work.batch * d),
        ),
    ]  # fmt: skip


def _recurrence(
    config: RNNConfig, part: str, *, batch: int, steps: int, d_state: int, copies: int, starts_at_zero: bool
) -> list[Operation]:
    """All inputs are projected at once; what a state adds must wait for that state. 32 bits under mixed precision."""
    gates, states = GATES[config.cell] * d_state, STATES[config.cell]
    recurrent = Product(rows=batch, inner=d_state, columns=gates)
    n = batch * d_state
    return [
        replace(
            linear(part, "input", rows=batch * steps, d_in=config.d_model, d_out=gates, bias=True, copies=copies),
            is_wide=True,
        ),
        Operation(
            part=part, name="recurrent", copies=copies, steps=steps, product=recurrent,
            no_gradient=recurrent.multiply_adds if starts_at_zero else 0,
            elementwise=batch * gates, parameters=(d_state + 1) * gates, weights=(d_state + 1) * gates,
            reads=n, writes=batch * gates, is_wide=True,
        ),
        Operation(
            part=part, name="gates", copies=copies, steps=steps, elementwise=batch * gates * PER_GATE,
            reads=2 * batch * gates + states * n, writes=states * n, is_wide=True,
            kept=Kept(wide=KEPT[config.cell][0 if starts_at_zero else 1] * n),
        ),
    ]  # fmt: skip


def _attention(config: RNNConfig, work: Workload) -> list[Operation]:
    """With a cache the source's keys, where they are projected, are made at the first step and kept."""
    if config.attention is ScoreKind.NONE:
        return []
    b, n, m, d = work.batch, work.n_new, work.n_source, config.d_model
    part, square, source = "decoder.attention", b * n * m, b * m * d
    is_cached = work.mode is Mode.DECODE
    cache, fresh = (source, 0) if is_cached else (0, source)
    key = linear(part, "key", rows=b * m, d_in=d, d_out=d, bias=False)
    keys = [] if is_cached else [key]
    compare = Product(groups=b, rows=n, inner=d, columns=m)
    scores = Operation(part=part, name="scores", product=compare, reads=b * n * d + fresh, cache=cache, writes=square)
    match config.attention:
        case ScoreKind.GENERAL:
            similarity = [*(replace(one, kept=Kept(numbers=source)) for one in keys), scores]
        case ScoreKind.ADDITIVE:
            similarity = [
                linear(part, "query", rows=b * n, d_in=d, d_out=d, bias=False),
                *keys,
                Operation(
                    part=part, name="add", elementwise=square * d * (1 + TANH), reads=b * n * d + fresh,
                    cache=cache, writes=square * d, kept=Kept(numbers=square * d),
                ),
                linear(part, "similarity", rows=square, d_in=d, d_out=1, bias=False),
            ]  # fmt: skip
        case _:
            similarity = [scores]
    return [
        *similarity,
        Operation(
            part=part, name="softmax", elementwise=SOFTMAX * square, reads=square, writes=square,
            kept=Kept(numbers=2 * square),
        ),
        Operation(
            part=part, name="mix", product=Product(groups=b, rows=n, inner=m, columns=d),
            reads=square + fresh, cache=cache, writes=b * n * d,
            kept=Kept(numbers=b * (n + m) * d),
        ),
        linear(
            "decoder.combine", "project", rows=b * n, d_in=2 * d, d_out=d, bias=True,
            kept=Kept(numbers=3 * b * n * d),
        ),
    ]  # fmt: skip
