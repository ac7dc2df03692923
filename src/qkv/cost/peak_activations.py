"""Compute the peak activation memory of a forward pass that saves nothing for the backward pass.

The numbers follow the execution order of the model in eager torch. The input of a module stays in memory until the
module returns, so the inputs of the stack and of the current block are live inside the block. Local variables stay in
memory until the function returns, so the queries, keys, values and attention results are live during the output
projection.
"""

from qkv.choices import AttentionKernel, HeadCombination, NormPosition, PositionKind, RNNAttentionScore
from qkv.config import BERTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.operation import LOGITS, NO_SAVED_TENSORS, Operation, SavedTensors
from qkv.cost.operations import NORM_COSTS, SCORE_BIAS_POSITIONS, BlockStack, block_stacks, list_operations
from qkv.cost.rnn import KEY_PROJECTING_SCORES
from qkv.cost.workload import Mode, Workload

EAGER_SCORE_COPIES = 4
"""Number of n×n tensors in eager attention: scores, scores with empty rows made safe, softmax, softmax with empty rows
zeroed."""
ROTARY_COPIES = 3
"""Number of temporary tensors in the rotary embedding: x·cos, x with its halves swapped, and the swapped x times
sin."""
BUCKET_BYTES_PER_PAIR = 49
"""Bytes per query–key pair while T5's distance buckets are being computed: six int64 values and a bool."""
WINDOW_BYTES_PER_PAIR = 18
"""Bytes per query–key pair while a window mask is being built: the signed and absolute distances (int64) and two
bools."""


def peak_inference_activation_bytes(config: ModelConfig, workload: Workload, *, source_cache_bytes: int) -> int:
    """Return the peak memory of the activations within a pass in bytes.

    `source_cache_bytes` is the size of the cached keys and values of the source, which do not exist yet while the
    encoder runs.
    """
    operations = list_operations(config, workload)
    dtype = workload.dtype
    if isinstance(config, RNNConfig):
        per_operation = [SavedTensors(fp32_elements=op.reads + op.writes) for op in operations]
        return max(live.n_bytes(dtype) for live in (*per_operation, *_rnn_attention_peak_candidates(config, workload)))
    *encoder_stacks, last_stack = block_stacks(config, workload)
    states = SavedTensors(fp32_elements=last_stack.n_rows * config.d_model)
    source = NO_SAVED_TENSORS
    if isinstance(config, Seq2SeqConfig):
        source = SavedTensors(fp32_elements=workload.batch_size * workload.n_source * config.d_model)
    fills_cache = workload.mode in (Mode.PREFILL, Mode.DECODE)
    peaks = [_logits_peak(op, config, workload, states=states) + source for op in operations if op.name == LOGITS]
    peaks += [live + source for live in _block_peak_candidates(last_stack, fills_cache=fills_cache)]
    peaks += [
        SavedTensors(fp32_elements=op.reads + op.writes) for op in operations if not op.is_block and op.name != LOGITS
    ]
    before_cache = [
        live
        for stack in encoder_stacks
        for live in (*_block_peak_candidates(stack, fills_cache=False), _mask_and_bias_setup_peak(stack))
    ]
    before_cache.append(_mask_and_bias_setup_peak(last_stack) + source)
    return max(
        [
            *(live.n_bytes(dtype) for live in peaks),
            *(live.n_bytes(dtype) - source_cache_bytes for live in before_cache),
        ]
    )


def _logits_peak(op: Operation, config: ModelConfig, workload: Workload, *, states: SavedTensors) -> SavedTensors:
    """Return the tensors that are live while the logits are computed.

    These are the states, the logits and, if rows are selected, a copy of the selected rows.
    """
    is_copy = isinstance(config, BERTConfig) or workload.n_logit_rows < workload.n_tokens
    return states + SavedTensors(elements=op.writes + (op.reads if is_copy else 0))


def _block_peak_candidates(stack: BlockStack, *, fills_cache: bool) -> list[SavedTensors]:
    """Return the live tensors at each candidate peak within a block.

    Cached keys and values are counted separately.
    """
    x = stack.n_rows * stack.config.d_model
    is_pre_norm = stack.config.norm_position is NormPosition.PRE
    inputs = SavedTensors(fp32_elements=min(2, stack.n_layers) * x) + _shared_position_and_mask_tensors(stack)
    residual_adds = [SavedTensors(fp32_elements=x, elements=x)]
    if not is_pre_norm:
        residual_adds.append(SavedTensors(fp32_elements=x) + _live_post_norm_tensors(stack, x))
    normed = SavedTensors(fp32_elements=x) if is_pre_norm else NO_SAVED_TENSORS
    peaks = [inputs + normed + live for live in _attention_peak_candidates(stack, "attention", fills_cache=fills_cache)]
    peaks += [inputs + live for live in residual_adds]
    after_attention = inputs + SavedTensors(fp32_elements=x)
    if stack.n_source is not None:
        cross_attention = _attention_peak_candidates(stack, "cross_attention", fills_cache=fills_cache)
        peaks += [after_attention + normed + live for live in cross_attention]
    hidden = stack.n_rows * stack.config.d_ff
    activation = SavedTensors(elements=(3 if stack.config.gated else 2) * hidden)
    return [
        *peaks,
        after_attention + normed + activation,
        after_attention + normed + SavedTensors(elements=hidden + x),
        *(after_attention + live for live in residual_adds),
    ]


def _rnn_attention_peak_candidates(config: RNNConfig, workload: Workload) -> list[SavedTensors]:
    """Return the live tensors at each candidate peak in an RNN's decoder attention, which has no fused kernel."""
    if config.attention is RNNAttentionScore.NONE:
        return []
    target, source = (workload.batch_size * n * config.d_model for n in (workload.n_queries, workload.n_source))
    square = workload.batch_size * workload.n_queries * workload.n_source
    has_keys = config.attention in KEY_PROJECTING_SCORES
    # The input and states of the decoder, and the source unless it is counted as cache.
    inputs = SavedTensors(elements=2 * target + (0 if workload.mode is Mode.DECODE else source * (1 + has_keys)))
    peaks = [inputs + SavedTensors(elements=EAGER_SCORE_COPIES * square)]
    if config.attention is RNNAttentionScore.ADDITIVE:
        # The sum of query and key, and the tanh of that sum.
        peaks.append(inputs + SavedTensors(elements=2 * square * config.d_model))
    return peaks


def _mask_and_bias_setup_peak(stack: BlockStack) -> SavedTensors:
    """Return the tensors that are live while the masks and biases shared by all blocks are built.

    They include the input of the first block.
    """
    pairs, config = stack.n_queries * stack.n_keys, stack.config
    has_window = config.sliding_window is not None
    if config.positions is PositionKind.RELATIVE:
        bytes_per_pair = BUCKET_BYTES_PER_PAIR + has_window
    else:
        bytes_per_pair = WINDOW_BYTES_PER_PAIR if has_window else 0
    return SavedTensors(fp32_elements=stack.n_rows * config.d_model, raw_bytes=bytes_per_pair * pairs)


def _live_post_norm_tensors(stack: BlockStack, residual_elements: int) -> SavedTensors:
    """Return the live tensors of a post-norm in addition to its input."""
    cost = NORM_COSTS[stack.config.norm]
    copies = 1 if stack.on_gpu else 1 + cost.n_cpu_copies
    return SavedTensors(fp32_elements=residual_elements * copies + stack.n_rows * cost.n_statistics)


def _shared_position_and_mask_tensors(stack: BlockStack) -> SavedTensors:
    """Return the tensors that all blocks share: float32 rotary angles, a score bias, and a window mask."""
    config, pairs = stack.config, stack.n_queries * stack.n_keys
    mask_bytes = pairs if config.sliding_window is not None else 0
    match config.positions:
        case PositionKind.ROTARY:
            return SavedTensors(raw_bytes=8 * stack.n_queries * config.d_head + mask_bytes)
        case _ if config.positions in SCORE_BIAS_POSITIONS:
            return SavedTensors(fp32_elements=config.n_heads * pairs, raw_bytes=mask_bytes)
        case _:
            return SavedTensors(raw_bytes=mask_bytes)


def _attention_peak_candidates(stack: BlockStack, sublayer: str, *, fills_cache: bool) -> list[SavedTensors]:
    """Return the live tensors at each candidate peak within attention, excluding the residual stream.

    The candidates are the projections, the rotary embedding, the attention operation and the output projection.
    """
    config, rows, is_self = stack.config, stack.n_rows, sublayer == "attention"
    m = stack.n_keys if is_self else stack.n_source or 0
    query = rows * config.n_heads * config.d_head
    # The new keys and values of a decode step exist in addition to the cache. The keys and values of a source are part
    # of the cache.
    n_new = 0 if fills_cache and not is_self else stack.batch_size * (stack.n_queries if is_self else m)
    key, value = (n_new * config.n_kv_heads * width for width in (config.d_head, config.d_value))
    is_rotated = is_self and config.positions is PositionKind.ROTARY
    keys_and_values = 0 if fills_cache else key + value
    results = rows * config.n_heads * config.d_value
    peaks = [
        SavedTensors(elements=query + key + value),
        SavedTensors(elements=query + keys_and_values)
        + _live_attention_core_tensors(stack, m, output_elements=results, is_self=is_self),
    ]
    if is_rotated:
        rotating_queries = (1 + ROTARY_COPIES) * query + key + value
        rotating_keys = 2 * query + value + (1 + ROTARY_COPIES) * key
        peaks.append(SavedTensors(elements=max(rotating_queries, rotating_keys)))
    # Concatenating the heads requires a copy, except that the output of the fused kernel can be viewed.
    is_view = config.head_combination is HeadCombination.SPLIT and stack.kernel is AttentionKernel.FUSED
    is_view = is_view and not (is_self and _needs_dense_mask(stack))
    joined = 0 if is_view else results if config.head_combination is HeadCombination.SPLIT else rows * config.d_value
    projected = rows * config.d_model if config.output_projection else 0
    return [*peaks, SavedTensors(elements=query + keys_and_values + results + joined + projected)]


def _live_attention_core_tensors(
    stack: BlockStack, n_keys: int, *, output_elements: int, is_self: bool
) -> SavedTensors:
    """Return the tensors that are live during the scores, softmax and mix over `n_keys` keys."""
    config, pairs = stack.config, stack.n_queries * n_keys
    square = stack.batch_size * config.n_heads * pairs
    rows = stack.n_rows * config.n_heads
    key = stack.batch_size * n_keys * config.n_heads * config.d_head
    if stack.kernel is AttentionKernel.EAGER:
        # Keys and values are repeated for the heads that share them, even if every head has its own.
        repeated = max(key, stack.batch_size * n_keys * config.n_heads * config.d_value)
        return SavedTensors(elements=max(EAGER_SCORE_COPIES * square, square + repeated), raw_bytes=rows)
    if not stack.on_gpu and config.d_head != config.d_value:
        # torch has no fused CPU kernel for these shapes. The fallback holds the scores, the softmax, and a bool for
        # each −∞.
        mask = pairs if is_self and stack.causal else 0
        return SavedTensors(elements=mask + max(2 * square + rows * config.d_head, key), raw_bytes=square + rows)
    if not (is_self and _needs_dense_mask(stack)):
        return SavedTensors(elements=output_elements, fp32_elements=rows)
    # With a dense mask, the results are copied to zero the rows that attend to nothing. The mask is merged into the
    # bias, or converted to numbers by the kernel. The window mask itself is counted with the shared tensors.
    if config.positions in SCORE_BIAS_POSITIONS:
        return SavedTensors(elements=2 * output_elements, fp32_elements=config.n_heads * pairs, raw_bytes=pairs)
    return SavedTensors(elements=output_elements + max(output_elements, pairs), raw_bytes=pairs)


def _needs_dense_mask(stack: BlockStack) -> bool:
    """Return True if the fused kernel requires a dense mask.

    The kernel applies a causal mask itself unless there is a bias.
    """
    has_bias = stack.config.positions in SCORE_BIAS_POSITIONS
    return stack.config.sliding_window is not None or (stack.causal and has_bias)
