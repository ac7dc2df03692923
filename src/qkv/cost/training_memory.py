"""Compute the peak memory of a training step, excluding the weights and optimizer state, which are always in memory.

During the backward pass, activations are freed and gradients are allocated at a constant rate, so the peak occurs at
one of three points: at the loss, when the backward pass enters the last block, or when it reaches the embedding. The
numbers follow eager torch, based on what each operation saves and allocates.
"""

from dataclasses import dataclass

from qkv.choices import AttentionKernel, PositionKind
from qkv.config import ModelConfig, TransformerConfig
from qkv.cost.blocks import SCORE_BIAS_POSITIONS
from qkv.cost.operation import LOGITS, LOSS, NO_SAVED_TENSORS, Operation
from qkv.cost.workload import Precision, Workload

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
