"""List the operations of one step for each of the four model families."""

from dataclasses import replace
from typing import assert_never

from qkv.choices import PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.blocks import ACTIVATION_OPS, BlockStack, norm_operation
from qkv.cost.operation import (
    LOGITS,
    Operation,
    Phase,
    SavedTensors,
    linear_operation,
    logits_operation,
    lookup_operation,
    loss_operation,
    sum_decode_steps,
)
from qkv.cost.rnn import list_rnn_operations
from qkv.cost.workload import Mode, Workload


def list_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    """List the operations of a step in execution order. The parts have the same names as the modules of the model."""
    workload.check_supported_by(config)
    match workload.mode:
        case Mode.GENERATE:
            return _generation_operations(config, workload)
        case Mode.TRAIN:
            operations = _single_pass_operations(config, workload)
            return [*operations, *(loss_operation(op) for op in operations if op.name == LOGITS)]
        case _:
            return _single_pass_operations(config, workload)


def _generation_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    """List the operations of the prefill, followed by those of all decode steps combined.

    The combined costs are exact because each size grows linearly from step to step.
    """
    prefill = workload.replace(mode=Mode.PREFILL, n_new_tokens=None, logits_to_keep=workload.logits_to_keep or 1)
    operations = [replace(op, phase=Phase.PREFILL) for op in _single_pass_operations(config, prefill)]
    # Once the sliding window is full, keys are masked and the sizes grow differently. The steps before and after that
    # point are therefore summed separately.
    window = config.sliding_window if isinstance(config, TransformerConfig) else None
    first, last = workload.seq_len + 1, workload.final_seq_len
    edge = last if window is None else min(max(window, workload.seq_len), last)
    for start, end in ((first, edge), (edge + 1, last)):
        if start <= end:
            steps = [
                _single_pass_operations(
                    config, workload.replace(mode=Mode.DECODE, n_new_tokens=None, logits_to_keep=None, seq_len=n)
                )
                for n in (start, end)
            ]
            operations += [
                sum_decode_steps(first_op, last_op, end - start + 1) for first_op, last_op in zip(*steps, strict=True)
            ]
    return operations


def _single_pass_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    match config:
        case GPTConfig():
            return _gpt_operations(config, workload)
        case BERTConfig():
            return _bert_operations(config, workload)
        case Seq2SeqConfig():
            return _seq2seq_operations(config, workload)
        case RNNConfig():
            return list_rnn_operations(config, workload)
        case _:
            assert_never(config)


def block_stacks(config: ModelConfig, workload: Workload) -> list[BlockStack]:
    """List the block stacks that one pass runs through, in order. An RNN has no block stacks."""
    shared = {"batch_size": workload.batch_size, "kernel": workload.kernel, "on_gpu": workload.on_gpu}
    is_decode = workload.mode is Mode.DECODE
    sizes = {**shared, "n_queries": workload.n_queries, "n_keys": workload.seq_len, "is_cached": is_decode}
    match config:
        case GPTConfig():
            return [BlockStack(config=config, n_layers=config.n_layers, causal=config.causal, **sizes)]
        case BERTConfig():
            return [BlockStack(config=config, n_layers=config.n_layers, causal=False, **sizes)]
        case Seq2SeqConfig():
            source = {**shared, "n_queries": workload.n_source, "n_keys": workload.n_source}
            encoder = BlockStack(
                config=config, **source, prefix="encoder.", n_layers=config.n_encoder_layers, causal=False
            )
            sizes |= {"n_layers": config.n_decoder_layers, "n_source": workload.n_source}
            decoder = BlockStack(config=config, **sizes, prefix="decoder.", causal=True)
            # A decode step reads the encoder output from the cache.
            return [decoder] if is_decode else [encoder, decoder]
        case RNNConfig():
            return []


def _operations_up_to_final_states(
    config: TransformerConfig,
    workload: Workload,
    stack: BlockStack,
    *,
    source_vocab_size: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:
    """List the operations from token ids to the final states of a block stack."""
    prefix, rows = stack.prefix, stack.n_rows
    return [
        *_embedding_operations(
            config, workload, rows, prefix=prefix, source_vocab_size=source_vocab_size, n_segments=n_segments
        ),
        *_relative_bias_operations(config, stack.n_queries, stack.n_keys, prefix=prefix),
        *stack.operations(),
        *_final_norm_operations(config, workload, rows, prefix=prefix),
    ]


def _gpt_operations(config: GPTConfig, workload: Workload) -> list[Operation]:
    (stack,) = block_stacks(config, workload)
    return [
        *_operations_up_to_final_states(config, workload, stack),
        _unembedding_operation(config, workload.n_logit_rows),
    ]


def _bert_operations(config: BERTConfig, workload: Workload) -> list[Operation]:
    """List the operations of the encoder and every configured head.

    Heads other than the masked-LM head run only on [CLS].
    """
    (stack,) = block_stacks(config, workload)
    encoder = _operations_up_to_final_states(config, workload, stack, n_segments=config.n_segments or None)
    return [*encoder, *_bert_head_operations(config, workload)]


def _bert_head_operations(config: BERTConfig, workload: Workload) -> list[Operation]:
    d, rows, batch_size = config.d_model, workload.n_logit_rows, workload.batch_size
    heads = []
    if config.pooler:
        pooled = {"rows": batch_size, "d_in": d, "bias": True}
        heads.append(
            linear_operation("pooler", "project", **pooled, d_out=d, saved=SavedTensors(elements=batch_size * d))
        )
        if config.next_sentence_head:
            heads.append(linear_operation("next_sentence", "project", **pooled, d_out=2))
        if config.n_classes is not None:
            heads.append(linear_operation("classifier", "project", **pooled, d_out=config.n_classes))
    if config.masked_lm_head:
        n, part = rows * d, "masked_lm"
        heads += [
            linear_operation(
                part,
                "dense",
                rows=rows,
                d_in=d,
                d_out=d,
                bias=True,
                saved=SavedTensors(elements=n, autocast_elements=n),
            ),
            Operation(
                part=part,
                name="activation",
                elementwise=ACTIVATION_OPS[config.activation] * n,
                reads=n,
                writes=n,
                saved=SavedTensors(fp32_elements=n),
            ),
            norm_operation(config, part, rows=rows, on_gpu=workload.on_gpu),
            _unembedding_operation(config, rows, part=part),
        ]
    return heads


def _seq2seq_operations(config: Seq2SeqConfig, workload: Workload) -> list[Operation]:
    *encoder_stacks, decoder_stack = block_stacks(config, workload)
    encoder: list[Operation] = []
    for stack in encoder_stacks:
        embedding, *rest = _operations_up_to_final_states(
            config, workload, stack, source_vocab_size=config.source_vocab_size
        )
        if config.d_patch is not None:
            embedding = _patch_embedding_operation(embedding.part, stack.n_rows, config.d_patch, config.d_model)
        encoder += [embedding, *rest]
    decoder = _operations_up_to_final_states(config, workload, decoder_stack)
    return [*encoder, *decoder, _unembedding_operation(config, workload.n_logit_rows)]


def _patch_embedding_operation(part: str, rows: int, d_patch: int, d_model: int) -> Operation:
    """Build the operation for the linear embedding of image patches, which replaces the token lookup.

    The gradient of the patches is not needed.
    """
    saved = SavedTensors(autocast_elements=rows * d_patch)
    op = linear_operation(part, "project", rows=rows, d_in=d_patch, d_out=d_model, bias=False, saved=saved)
    return replace(op, skipped_gradient_macs=rows * d_patch * d_model)


def _embedding_operations(
    config: TransformerConfig,
    workload: Workload,
    rows: int,
    *,
    prefix: str = "",
    source_vocab_size: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:
    """List the operations of the token, segment and position embeddings and the embedding norm.

    `source_vocab_size` is set for an encoder. A table that is shared by the encoder and decoder is counted in the
    encoder.
    """
    d, part = config.d_model, f"{prefix}embedding"
    is_shared = source_vocab_size is None and isinstance(config, Seq2SeqConfig) and config.share_embeddings
    n_entries = config.vocab_size if source_vocab_size is None else source_vocab_size
    operations = [
        lookup_operation(f"{part}.token", rows=rows, n_entries=n_entries, width=d, parameters=0 if is_shared else None)
    ]
    if n_segments is not None:
        operations.append(lookup_operation(f"{part}.segment", rows=rows, n_entries=n_segments, width=d, add=True))
    position = f"{part}.position"
    match config.positions:
        case PositionKind.LEARNED:
            n_entries = config.context_length + config.position_offset
            operations.append(lookup_operation(position, rows=rows, n_entries=n_entries, width=d, add=True))
        case PositionKind.SINUSOIDAL:
            n = rows * d
            operations.append(
                Operation(part=position, name="add", elementwise=n, reads=n, writes=n, autocast_fp32=True)
            )
        case PositionKind.CONCATENATED:
            saved = SavedTensors(elements_without_autocast=2 * rows * d, autocast_elements=2 * rows * d)
            operations.append(
                linear_operation(position, "project", rows=rows, d_in=2 * d, d_out=d, bias=False, saved=saved)
            )
        case _:
            pass
    # The residual stream, which the first block reads and the backward pass of its norm needs.
    operations.append(Operation(part=part, name="sum", saved=SavedTensors(fp32_elements=rows * d)))
    if config.embedding_norm:
        operations.append(norm_operation(config, f"{part}.norm", rows=rows, on_gpu=workload.on_gpu))
    return operations


def _relative_bias_operations(
    config: TransformerConfig, n_queries: int, n_keys: int, *, prefix: str = ""
) -> list[Operation]:
    """List the lookup of T5's relative position bias, which all layers of a stack share.

    The lookup saves int64 indices.
    """
    if config.positions is not PositionKind.RELATIVE:
        return []
    pairs = n_queries * n_keys
    lookup = Operation(
        part=f"{prefix}relative_positions",
        name="lookup",
        parameters=config.relative_buckets * config.n_heads,
        weights=pairs * config.n_heads,
        writes=pairs * config.n_heads,
        autocast_fp32=True,
        saved=SavedTensors(raw_bytes=8 * pairs),
    )
    return [lookup]


def _final_norm_operations(
    config: TransformerConfig, workload: Workload, rows: int, *, prefix: str = ""
) -> list[Operation]:
    return (
        [norm_operation(config, f"{prefix}final_norm", rows=rows, on_gpu=workload.on_gpu)] if config.final_norm else []
    )


def _unembedding_operation(config: TransformerConfig, rows: int, *, part: str = "unembedding") -> Operation:
    return logits_operation(
        part,
        rows=rows,
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        is_tied=config.tie_embeddings,
        bias=config.unembedding_bias,
    )
