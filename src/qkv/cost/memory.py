"""Estimate the peak memory use of a step and its breakdown by category."""

from dataclasses import asdict, dataclass

from qkv.choices import AttentionKernel, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.kernel_launch import shard_size, split_device_parameters_by_optimizer
from qkv.cost.operation import LOGITS, LOSS, NO_SAVED_TENSORS, Operation
from qkv.cost.operations import SCORE_BIAS_POSITIONS, count_parameters
from qkv.cost.peak_activations import peak_inference_activation_bytes
from qkv.cost.rnn import KEY_PROJECTING_SCORES, STATES_PER_CELL
from qkv.cost.workload import Mode, Precision, Sharding, Workload

LOSS_ITEMSIZE = 4
"""Bytes per element in the loss computation, which always uses float32."""


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """The bytes that are live between the forward and backward passes."""

    saved: int
    """Bytes of the tensors that autograd saves, excluding the log-probabilities."""
    log_probs: int
    recomputed: int
    """Bytes of the tensors in the block that activation checkpointing has just recomputed."""
    weight_casts: int
    """Bytes of the 16-bit copies of all weights."""
    weight_casts_outside_blocks: int

    @property
    def activations(self) -> int:
        return self.saved + self.log_probs + self.recomputed


def saved_recomputed_and_cast_bytes(operations: list[Operation], workload: Workload) -> LiveBytes:
    """Sum the bytes that are live between the forward and backward passes."""
    saved, blocks = NO_SAVED_TENSORS, {}
    for op in operations:
        if op.part == LOSS or (workload.loss_chunk_size is not None and op.name == LOGITS):
            continue
        if workload.activation_checkpointing and op.is_block:
            # The blocks of a stack are recomputed one at a time, so only the largest block counts.
            stack = op.part.split("blocks")[0]
            blocks[stack] = blocks.get(stack, NO_SAVED_TENSORS) + op.saved * op.steps
            if op.part.endswith("feed_forward_out"):
                # The output of a block is the input of the next block, and checkpointing saves this input.
                saved = saved + op.saved * op.copies
        else:
            saved = saved + op.saved * op.runs
    log_probs = sum((op.saved for op in operations if op.part == LOSS), NO_SAVED_TENSORS)
    return LiveBytes(
        saved=saved.n_bytes(workload.dtype),
        log_probs=log_probs.n_bytes(workload.dtype) if workload.loss_chunk_size is None else 0,
        recomputed=max((block.n_bytes(workload.dtype) for block in blocks.values()), default=0),
        weight_casts=weight_cast_bytes(operations, workload),
        weight_casts_outside_blocks=weight_cast_bytes([op for op in operations if not op.is_block], workload),
    )


def weight_cast_bytes(operations: list[Operation], workload: Workload) -> int:
    """Return the size in bytes of the 16-bit weight copies that autocast makes."""
    return sum(op.weight_cast_bytes_moved(workload.dtype)[1] * op.copies for op in operations)


def loss_block_embedding_peak_bytes(
    operations: list[Operation], config: ModelConfig, workload: Workload, *, gradient_bytes: int
) -> dict[str, int]:
    """Return the memory in bytes at each of the three candidate peaks of a step."""
    live = saved_recomputed_and_cast_bytes(operations, workload)
    head = _largest_head(operations)
    unembedding = 0 if head is None else head.weights * workload.dtype.param_itemsize
    # With gradient accumulation, the gradients of earlier micro-batches are also in memory.
    accumulated = gradient_bytes if workload.accumulation_steps > 1 else 0
    residual = workload.n_tokens * config.d_model * workload.dtype.param_itemsize
    casts = live.weight_casts_outside_blocks if workload.activation_checkpointing else live.weight_casts
    is_mixed = workload.dtype is Precision.MIXED
    if workload.loss_chunk_size is not None and head is not None:
        casts -= head.weights * (workload.dtype.matmul_itemsize if is_mixed else 0)
    # A tied embedding receives two gradients. Without autocast, their sum is a third tensor.
    n_embedding_gradients = (1 if is_mixed else 2) * config.tie_embeddings + (accumulated > 0)
    in_blocks = (
        live.saved
        - _bytes_freed_before_block_backward(operations, workload, residual)
        + live.recomputed
        + casts
        + unembedding
    )
    return {
        "loss": accumulated
        + live.saved
        + _peak_loss_and_weight_cast_bytes(head, workload, live=live, backward_cast_bytes=casts),
        "blocks": accumulated + in_blocks + residual + _block_backward_temporary_bytes(operations, config, workload),
        "embedding": gradient_bytes + n_embedding_gradients * unembedding + 2 * residual,
    }


def _bytes_freed_before_block_backward(operations: list[Operation], workload: Workload, residual_bytes: int) -> int:
    """Return the number of bytes freed before the backward pass enters the last block.

    They belong to the tensors of the head and the input of a final norm.
    """
    last = max((i for i, op in enumerate(operations) if op.is_block), default=len(operations))
    above = [
        op for op in operations[last + 1 :] if op.part != LOSS and not (workload.loss_chunk_size and op.name == LOGITS)
    ]
    norm_input = residual_bytes if any(op.name == "norm" for op in above) else 0
    return sum((op.saved * op.runs for op in above), NO_SAVED_TENSORS).n_bytes(workload.dtype) + norm_input


def _largest_head(operations: list[Operation]) -> Operation | None:
    """Return the operation that computes the most logits, or None if no operation computes logits."""
    return max((op for op in operations if op.name == LOGITS), key=lambda op: op.writes, default=None)


def _peak_loss_and_weight_cast_bytes(
    head: Operation | None, workload: Workload, *, live: LiveBytes, backward_cast_bytes: int
) -> int:
    """Return the peak number of bytes used by the loss and the weight casts.

    All casts are live during the forward pass. `backward_cast_bytes` is the size of the casts that are kept for the
    backward pass.
    """
    if head is None or head.matmul is None:
        return live.weight_casts
    dtype = workload.dtype
    half_itemsize = dtype.matmul_itemsize if dtype.matmul_itemsize != LOSS_ITEMSIZE else 0
    if workload.loss_chunk_size is None:
        # The forward pass holds the logits (also in float32) and log-probabilities. The backward pass holds the
        # log-probabilities and two gradients.
        forward = live.weight_casts + head.writes * (half_itemsize + 2 * LOSS_ITEMSIZE)
        return max(forward, backward_cast_bytes + 3 * LOSS_ITEMSIZE * head.writes)
    # The scaled states and their gradient, and the gradient of the unembedding and the increment added to it.
    rows, d, vocab_size = head.matmul.rows, head.matmul.inner, head.matmul.columns
    states = (3 if dtype is Precision.MIXED else 2) * rows * d * dtype.param_itemsize
    unembedding = vocab_size * d
    logits = min(workload.loss_chunk_size, rows) * vocab_size
    # While the logits of a chunk are computed, the logits and errors of the previous chunk are still in memory.
    previous = 2 * LOSS_ITEMSIZE if workload.loss_chunk_size < rows else LOSS_ITEMSIZE
    temporary = max(
        logits * (previous + LOSS_ITEMSIZE + half_itemsize),
        logits * 2 * LOSS_ITEMSIZE + unembedding * (dtype.param_itemsize + half_itemsize),
    )
    return live.weight_casts + states + unembedding * dtype.param_itemsize + temporary


def _block_backward_temporary_bytes(operations: list[Operation], config: ModelConfig, workload: Workload) -> int:
    """Return the temporary memory in bytes during the backward pass of a block.

    With eager attention, this also covers the block's forward pass.
    """
    dtype, is_mixed = workload.dtype, workload.dtype is Precision.MIXED
    hidden = max((op.reads for op in operations if op.is_block and op.name == "activation"), default=0)
    weights = max((op.weights for op in operations if op.is_block and op.matmul is not None), default=0)
    square = max((op.writes for op in operations if op.is_attention_core and op.name == "scores"), default=0)
    copies = workload.n_tokens * config.d_model * dtype.matmul_itemsize if is_mixed else 0
    weight_gradient = weights * (dtype.param_itemsize + (dtype.matmul_itemsize if is_mixed else 0))
    feed_forward = hidden * dtype.matmul_itemsize + copies + weight_gradient
    positions = config.positions if isinstance(config, TransformerConfig) else PositionKind.NONE
    is_learned = positions is PositionKind.RELATIVE
    has_bias = positions in SCORE_BIAS_POSITIONS
    if workload.kernel is AttentionKernel.EAGER or (is_learned and not workload.on_gpu):
        # The tensors of the feed-forward layer are freed before the backward pass of attention starts.
        feed_forward_ops = [op.saved for op in operations if "blocks.feed_forward" in op.part]
        freed = sum(feed_forward_ops, NO_SAVED_TENSORS).n_bytes(dtype)
        itemsize = dtype.param_itemsize if workload.on_gpu or has_bias else dtype.matmul_itemsize
        return max(feed_forward, 2 * square * itemsize - freed)
    # Before it is summed over the batch, the gradient of a learned bias has the same shape as the scores.
    return max(feed_forward, square * dtype.matmul_itemsize if is_learned else 0)


CUBLAS_WORKSPACE_BYTES = 2 * 32 * 2**20
"""Size of the cuBLAS workspaces that torch allocates on Hopper and Blackwell: 32 MiB each for the forward and backward
threads."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Estimated memory per device in bytes, by category.

    Weights, gradients, optimizer state and cache are exact. In training, activations are the tensors that autograd
    saves for the backward pass, each counted once. In inference, activations are the peak within a pass (see
    `peak_activations`). The peak is the largest total at any time during the step (see `training_memory`) and includes
    the input ids.
    """

    weights: int
    ema: int = 0
    """Exponential moving average of the weights."""
    weight_casts: int = 0
    """16-bit copies of the weights made by autocast."""
    gradients: int = 0
    optimizer: int = 0
    """Optimizer state: two moments per parameter for AdamW, one for Muon."""
    activations: int = 0
    temporaries: int = 0
    """Temporary tensors at the peak: logits in the loss, gradients in flight, and copies made by the optimizer."""
    cublas_workspace: int = 0
    gathered_weights: int = 0
    """Weights that FSDP holds unsharded: those outside the blocks and those of two blocks."""
    cache: int = 0
    peak: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def estimate_memory(operations: list[Operation], config: ModelConfig, workload: Workload) -> MemoryEstimate:
    """Estimate the memory of one step."""
    # The operations of a cached decode step omit some parts of the model, but the weights of those parts are still in
    # memory.
    n_parameters = count_parameters(config).total
    if workload.mode is Mode.TRAIN:
        return _estimate_training_memory(operations, config, workload, n_parameters)
    weights = n_parameters * workload.dtype.param_itemsize
    weight_casts = weight_cast_bytes(operations, workload)
    passes = [workload]
    if workload.mode is Mode.GENERATE:
        sizes = ((Mode.PREFILL, workload.seq_len), (Mode.DECODE, workload.final_seq_len))
        passes = [workload.replace(mode=mode, n_new_tokens=None, logits_to_keep=1, seq_len=n) for mode, n in sizes]
    cache = source_cache = 0
    if workload.mode in (Mode.PREFILL, Mode.DECODE, Mode.GENERATE):
        settings = {"batch_size": workload.batch_size, "source_len": workload.n_source, "dtype": workload.dtype}
        cache = cache_bytes(config, seq_len=workload.final_seq_len, **settings)
        if isinstance(config, Seq2SeqConfig):
            source_cache = cache_bytes(config, seq_len=0, **settings)
    activations = max(
        peak_inference_activation_bytes(config, single_pass, source_cache_bytes=source_cache) for single_pass in passes
    )
    return MemoryEstimate(
        weights=weights,
        weight_casts=weight_casts,
        activations=activations,
        cache=cache,
        peak=weights + weight_casts + activations + cache + _input_and_target_or_position_bytes(config, workload),
    )


def cache_bytes(
    config: ModelConfig,
    *,
    batch_size: int,
    seq_len: int,
    source_len: int | None = None,
    dtype: Precision = Precision.FLOAT32,
) -> int:
    """Return the size of the KV cache in bytes for `seq_len` tokens per sequence and the source.

    An RNN caches the encoder states, the recurrent states and, if the attention projects the encoder states to keys,
    those keys.
    """
    n_source = seq_len if source_len is None else source_len
    match config:
        case GPTConfig():
            n_elements = config.n_layers * seq_len * _kv_width(config)
        case Seq2SeqConfig():
            n_elements = config.n_decoder_layers * (seq_len + n_source) * _kv_width(config)
        case RNNConfig():
            n_vectors = n_source * (1 + (config.attention in KEY_PROJECTING_SCORES))
            n_elements = (n_vectors + STATES_PER_CELL[config.cell] * config.n_decoder_layers) * config.d_model
        case BERTConfig():
            n_elements = 0
    return batch_size * n_elements * dtype.matmul_itemsize


def _kv_width(config: TransformerConfig) -> int:
    """Return the number of key and value elements per token in one layer."""
    return config.n_kv_heads * (config.d_head + config.d_value)


def _estimate_training_memory(
    operations: list[Operation], config: ModelConfig, workload: Workload, n_parameters: int
) -> MemoryEstimate:
    n_shards = workload.n_devices if workload.sharding is Sharding.FSDP else 1
    itemsize = workload.dtype.param_itemsize
    update = split_device_parameters_by_optimizer(operations, n_parameters, workload)
    persistent = {
        "weights": shard_size(n_parameters, n_shards) * itemsize,
        "ema": shard_size(n_parameters, n_shards) * itemsize if workload.ema else 0,
        "optimizer": update.state_elements * itemsize,
        "cublas_workspace": CUBLAS_WORKSPACE_BYTES if workload.on_gpu else 0,
        "gathered_weights": _peak_gathered_fsdp_parameters(operations) * itemsize if n_shards > 1 else 0,
    }
    live = saved_recomputed_and_cast_bytes(operations, workload)
    gradients = shard_size(n_parameters, n_shards) * itemsize
    stages = loss_block_embedding_peak_bytes(operations, config, workload, gradient_bytes=gradients)
    stages["update"] = gradients + update.muon_temporary_bytes(workload.dtype, on_gpu=workload.on_gpu)
    highest = max(stages.values())
    return MemoryEstimate(
        **persistent,
        weight_casts=live.weight_casts,
        gradients=gradients,
        activations=live.activations,
        temporaries=max(0, highest - live.activations - live.weight_casts),
        peak=sum(persistent.values()) + _input_and_target_or_position_bytes(config, workload) + highest,
    )


def _input_and_target_or_position_bytes(config: ModelConfig, workload: Workload) -> int:
    """Return the size of the inputs in bytes.

    The inputs are int64 ids with as many targets (training) or one row of positions, and float32 patches.
    """
    match config:
        case _ if workload.mode is Mode.DECODE:
            source = 0
        case Seq2SeqConfig(d_patch=int(d_patch)):
            source = 4 * d_patch * workload.n_source
        case Seq2SeqConfig() | RNNConfig():
            source = 8 * workload.n_source
        case _:
            source = 0
    targets_or_positions = workload.n_tokens if workload.mode is Mode.TRAIN else workload.n_queries
    return workload.batch_size * source + 8 * (workload.n_tokens + targets_or_positions)


def _peak_gathered_fsdp_parameters(operations: list[Operation]) -> int:
    """Return the number of weight elements that FSDP holds unsharded at the peak.

    These are the weights outside the blocks and those of two blocks (current and prefetched).
    """
    outside = sum(op.n_parameters for op in operations if not op.is_block)
    per_block: dict[str, int] = {}
    for op in operations:
        if op.is_block:
            stack = op.part.split("blocks")[0]
            per_block[stack] = per_block.get(stack, 0) + op.parameters
    return outside + 2 * max(per_block.values(), default=0)
