"""List the operations of an RNN encoder–decoder with attention.

The sizes of the tensors saved for the backward pass were measured with torch's recurrent layers on a CPU.
"""

from dataclasses import replace

from qkv.choices import CellKind, RNNAttentionScore
from qkv.config import RNNConfig
from qkv.cost.operation import (
    SOFTMAX_OPS,
    MatMul,
    Operation,
    SavedTensors,
    linear_operation,
    logits_operation,
    lookup_operation,
)
from qkv.cost.workload import Mode, Workload

GATES_PER_CELL = {CellKind.GRU: 3, CellKind.LSTM: 4}
STATES_PER_CELL = {CellKind.GRU: 1, CellKind.LSTM: 2}
SAVED_PER_STATE = {CellKind.GRU: (8, 8), CellKind.LSTM: (24, 17)}
"""Elements saved per step and state element in the encoder and decoder. A reversed LSTM makes more copies."""
KEY_PROJECTING_SCORES = (RNNAttentionScore.GENERAL, RNNAttentionScore.ADDITIVE)
"""Attention score functions that project the encoder states to keys."""
OPS_PER_GATE = 4  # add the two products and the bias, then sigmoid or tanh
TANH_OPS = 1


def list_rnn_operations(config: RNNConfig, workload: Workload) -> list[Operation]:
    """List the operations of one pass in execution order."""
    d, vocab_size, rows = config.d_model, config.vocab_size, workload.n_tokens
    decoder = [
        replace(
            lookup_operation("embedding", rows=rows, n_entries=vocab_size, width=d),
            saved=SavedTensors(elements=rows * d),
        ),
        *_recurrent_layer_operations(
            config,
            "decoder.recurrence",
            batch_size=workload.batch_size,
            steps=workload.n_queries,
            d_state=d,
            copies=config.n_decoder_layers,
            starts_at_zero=False,
        ),
        *_rnn_attention_operations(config, workload),
        logits_operation(
            "unembedding",
            rows=workload.n_logit_rows,
            d_model=d,
            vocab_size=vocab_size,
            is_tied=config.tie_embeddings,
            bias=True,
        ),
    ]
    return decoder if workload.mode is Mode.DECODE else [*_rnn_encoder_operations(config, workload), *decoder]


def _rnn_encoder_operations(config: RNNConfig, workload: Workload) -> list[Operation]:
    d, rows = config.d_model, workload.batch_size * workload.n_source
    return [
        replace(
            lookup_operation("source_embedding", rows=rows, n_entries=config.source_vocab_size, width=d),
            saved=SavedTensors(elements=rows * d),
        ),
        *_recurrent_layer_operations(
            config,
            "encoder.recurrence",
            batch_size=workload.batch_size,
            steps=workload.n_source,
            d_state=d // 2,
            copies=2 * config.n_encoder_layers,
            starts_at_zero=True,
        ),
        linear_operation(
            "encoder.bridge",
            "project",
            rows=workload.batch_size,
            d_in=d,
            d_out=d,
            bias=True,
            copies=STATES_PER_CELL[config.cell],
            saved=SavedTensors(elements=2 * workload.batch_size * d),
        ),
    ]


def _recurrent_layer_operations(
    config: RNNConfig, part: str, *, batch_size: int, steps: int, d_state: int, copies: int, starts_at_zero: bool
) -> list[Operation]:
    """List the operations of a GRU or LSTM layer, which runs in float32 under autocast.

    The inputs of all steps are projected in one matmul. The state projections run sequentially.
    """
    d_gates, n_states = GATES_PER_CELL[config.cell] * d_state, STATES_PER_CELL[config.cell]
    recurrent = MatMul(rows=batch_size, inner=d_state, columns=d_gates)
    n = batch_size * d_state
    saved_per_state = SAVED_PER_STATE[config.cell][0 if starts_at_zero else 1]
    return [
        replace(
            linear_operation(
                part, "input", rows=batch_size * steps, d_in=config.d_model, d_out=d_gates, bias=True, copies=copies
            ),
            autocast_fp32=True,
        ),
        Operation(
            part=part,
            name="recurrent",
            copies=copies,
            steps=steps,
            matmul=recurrent,
            skipped_gradient_macs=recurrent.macs if starts_at_zero else 0,
            elementwise=batch_size * d_gates,
            parameters=(d_state + 1) * d_gates,
            weights=(d_state + 1) * d_gates,
            reads=n,
            writes=batch_size * d_gates,
            autocast_fp32=True,
        ),
        Operation(
            part=part,
            name="gates",
            copies=copies,
            steps=steps,
            elementwise=batch_size * d_gates * OPS_PER_GATE,
            reads=2 * batch_size * d_gates + n_states * n,
            writes=n_states * n,
            autocast_fp32=True,
            saved=SavedTensors(fp32_elements=saved_per_state * n),
        ),
    ]


def _rnn_attention_operations(config: RNNConfig, workload: Workload) -> list[Operation]:
    """List the operations of the decoder attention.

    A decode step reads the projected keys of the source from the cache.
    """
    if config.attention is RNNAttentionScore.NONE:
        return []
    b, n, m, d = workload.batch_size, workload.n_queries, workload.n_source, config.d_model
    part, square, source = "decoder.attention", b * n * m, b * m * d
    is_cached = workload.mode is Mode.DECODE
    cache, uncached = (source, 0) if is_cached else (0, source)
    k_proj = linear_operation(part, "k_proj", rows=b * m, d_in=d, d_out=d, bias=False)
    keys = [] if is_cached else [k_proj]
    scores = Operation(
        part=part,
        name="scores",
        matmul=MatMul(batch=b, rows=n, inner=d, columns=m),
        reads=b * n * d + uncached,
        cache=cache,
        writes=square,
    )
    match config.attention:
        case RNNAttentionScore.GENERAL:
            similarity = [*(replace(op, saved=SavedTensors(elements=source)) for op in keys), scores]
        case RNNAttentionScore.ADDITIVE:
            similarity = [
                linear_operation(part, "q_proj", rows=b * n, d_in=d, d_out=d, bias=False),
                *keys,
                Operation(
                    part=part,
                    name="add",
                    elementwise=square * d * (1 + TANH_OPS),
                    reads=b * n * d + uncached,
                    cache=cache,
                    writes=square * d,
                    saved=SavedTensors(elements=square * d),
                ),
                linear_operation(part, "similarity", rows=square, d_in=d, d_out=1, bias=False),
            ]
        case _:
            similarity = [scores]
    return [
        *similarity,
        Operation(
            part=part,
            name="softmax",
            elementwise=SOFTMAX_OPS * square,
            reads=square,
            writes=square,
            saved=SavedTensors(elements=2 * square),
        ),
        Operation(
            part=part,
            name="mix",
            matmul=MatMul(batch=b, rows=n, inner=m, columns=d),
            reads=square + uncached,
            cache=cache,
            writes=b * n * d,
            saved=SavedTensors(elements=b * (n + m) * d),
        ),
        linear_operation(
            "decoder.combine",
            "project",
            rows=b * n,
            d_in=2 * d,
            d_out=d,
            bias=True,
            saved=SavedTensors(elements=3 * b * n * d),
        ),
    ]
