"""How many bytes come and go in a training step: the moments at which most is held.

Weights and optimizer are always there and are not counted here. Activations empty while gradients fill up, evenly, so
the most is held at one of the ends: at the loss, when backward enters the last block, or when it has reached the
embedding. The figures are torch's eager road, read from what each operation keeps and makes.
"""

from dataclasses import dataclass

from qkv.choices import Kernel, PositionKind
from qkv.config import ModelConfig, TransformerConfig
from qkv.cost.blocks import BIASED
from qkv.cost.operation import LOGITS, LOSS, NOTHING, Operation
from qkv.cost.workload import Precision, Workload

LOSS_SIZE = 4
"""Bytes: a loss is computed in float32 whatever the model's precision."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What stands between forward and backward."""

    kept: int
    """By autograd, the logits' log-probabilities left out."""
    log_p: int
    again: int
    """By the one block that checkpointing has just computed again."""
    casts: int
    """Of all weights."""
    casts_outside: int
    """Of those that no block holds."""

    @property
    def activations(self) -> int:
        return self.kept + self.log_p + self.again


def held(made: list[Operation], work: Workload) -> Held:
    outside, blocks = NOTHING, {}
    for one in made:
        if one.part == LOSS or (work.loss_chunk is not None and one.name == LOGITS):
            continue
        if work.checkpointing and one.is_block:
            # Each stack's blocks are computed again one at a time; the largest one counts.
            stack = one.part.split("blocks")[0]
            blocks[stack] = blocks.get(stack, NOTHING) + one.kept * one.steps
            if one.part.endswith("feedforward_write"):
                outside = outside + one.kept * one.copies
        else:
            outside = outside + one.kept * one.runs
    log_p = sum((one.kept for one in made if one.part == LOSS), NOTHING)
    return Held(
        kept=outside.n_bytes(work.dtype),
        log_p=log_p.n_bytes(work.dtype) if work.loss_chunk is None else 0,
        again=max((kept.n_bytes(work.dtype) for kept in blocks.values()), default=0),
        casts=weight_casts(made, work),
        casts_outside=weight_casts([one for one in made if not one.is_block], work),
    )


def weight_casts(made: list[Operation], work: Workload) -> int:
    return sum(one.cast_bytes(work.dtype)[1] * one.copies for one in made)


def peaks(made: list[Operation], config: ModelConfig, work: Workload, *, gradients: int) -> dict[str, int]:
    """Bytes at each of those moments."""
    there = held(made, work)
    head = _head(made)
    table = 0 if head is None else head.weights * work.dtype.wide
    # Gradients of an earlier batch wait, and a new one is added to each.
    waiting = gradients if work.accumulation > 1 else 0
    stream = work.n_tokens * config.d_model * work.dtype.wide
    casts = there.casts_outside if work.checkpointing else there.casts
    if work.loss_chunk is not None and head is not None:
        casts -= head.weights * (work.dtype.narrow if work.dtype is Precision.MIXED else 0)
    # Of a tied table two gradients meet; at one precision throughout their sum is made beside them.
    n_tables = (1 if work.dtype is Precision.MIXED else 2) * config.tie_embeddings + (waiting > 0)
    in_block = there.kept - _above_blocks(made, work, stream) + there.again + casts + table
    return {
        "loss": waiting + there.kept + _loss(head, work, there=there, casts=casts),
        "blocks": waiting + in_block + stream + _block_work(made, config, work),
        "embedding": gradients + n_tables * table + 2 * stream,
    }


def _above_blocks(made: list[Operation], work: Workload, stream: int) -> int:
    """What backward has let go when it enters the last block: the head's, and what a last norm has read."""
    last = max((i for i, one in enumerate(made) if one.is_block), default=len(made))
    above = [one for one in made[last + 1 :] if one.part != LOSS and not (work.loss_chunk and one.name == LOGITS)]
    normed = stream if any(one.name == "norm" for one in above) else 0
    return sum((one.kept * one.runs for one in above), NOTHING).n_bytes(work.dtype) + normed


def _head(made: list[Operation]) -> Operation | None:
    return max((one for one in made if one.name == LOGITS), key=lambda one: one.writes, default=None)


def _loss(head: Operation | None, work: Workload, *, there: Held, casts: int) -> int:
    """Casts are all there in the forward pass, the blocks' among them; in backward those that are kept."""
    if head is None or head.product is None:
        return there.casts
    narrow = work.dtype.narrow if work.dtype.narrow != LOSS_SIZE else 0
    if work.loss_chunk is None:
        # Forward: logits, at 32 bits, log p. Backward: log p and two gradients.
        return max(there.casts + head.writes * (narrow + 2 * LOSS_SIZE), casts + 3 * LOSS_SIZE * head.writes)
    # The states, scaled, and their gradient; the table's gradient, and what is to be added to it.
    rows, d, n_words = head.product.rows, head.product.inner, head.product.columns
    states = (3 if work.dtype is Precision.MIXED else 2) * rows * d * work.dtype.wide
    table = n_words * d
    logits = min(work.loss_chunk, rows) * n_words
    # While a chunk's logits are made, the last chunk's logits and error are still held.
    previous = 2 * LOSS_SIZE if work.loss_chunk < rows else LOSS_SIZE
    working = max(
        logits * (previous + LOSS_SIZE + narrow),
        logits * 2 * LOSS_SIZE + table * (work.dtype.wide + narrow),
    )
    return there.casts + states + table * work.dtype.wide + working


def _block_work(made: list[Operation], config: ModelConfig, work: Workload) -> int:
    """What a block's backward (on the plain road: also its forward) holds for a while."""
    dtype, is_mixed = work.dtype, work.dtype is Precision.MIXED
    hidden = max((one.reads for one in made if one.is_block and one.name == "activation"), default=0)
    weights = max((one.weights for one in made if one.is_block and one.product is not None), default=0)
    square = max((one.writes for one in made if one.is_attention_core and one.name == "scores"), default=0)
    copies = work.n_tokens * config.d_model * dtype.narrow if is_mixed else 0
    feedforward = hidden * dtype.narrow + copies + weights * (dtype.wide + (dtype.narrow if is_mixed else 0))
    positions = config.positions if isinstance(config, TransformerConfig) else PositionKind.NONE
    is_learned = positions is PositionKind.RELATIVE
    has_bias = positions in BIASED
    if work.kernel is Kernel.PLAIN or (is_learned and not work.on_gpu):
        # By then the block's feed-forward part has let go.
        released = sum((one.kept for one in made if "blocks.feedforward" in one.part), NOTHING).n_bytes(dtype)
        size = dtype.wide if work.on_gpu or has_bias else dtype.narrow
        return max(feedforward, 2 * square * size - released)
    # A learned bias's gradient is made for every row of the batch.
    return max(feedforward, square * dtype.narrow if is_learned else 0)
