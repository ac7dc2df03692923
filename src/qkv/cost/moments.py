"""How many bytes of activations are held at once in a pass that keeps nothing for backward.

Read from the model's own order of work, on torch's eager road. What a module was given is held until it returns, so
below a block stand the stack's input and the block's; what a function has named is held until it ends, so attention
holds queries, keys, values and results while its output is projected.
"""

from qkv.choices import HeadLayout, Kernel, NormKind, NormPosition, PositionKind, ScoreKind
from qkv.config import BERTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.blocks import BIASED, Stack
from qkv.cost.operation import LOGITS, NOTHING, Kept, Operation
from qkv.cost.operations import operations, stacks_of
from qkv.cost.recurrent import PROJECTED
from qkv.cost.workload import Mode, Workload

SQUARES = 4
"""Scores, these with empty rows made safe, their softmax, and that with empty rows at zero: the plain road's n×n."""
TURNING = 3
"""Of what is rotated: x·cos, its halves swapped, these times sin."""
BUCKETING = 49
"""Bytes a pair while T5's buckets of distances are found: six whole numbers of 8, and a flag."""
MASKING = 18
"""The same while a window's table is made: a distance, without its sign, and two flags."""


def most_held(config: ModelConfig, work: Workload, *, source_cache: int) -> int:
    """At the worst moment. `source_cache`: bytes of a source's keys and values, which its encoder has not made yet."""
    made = operations(config, work)
    if isinstance(config, RNNConfig):
        each = [Kept(wide=one.reads + one.writes) for one in made]
        return max(one.n_bytes(work.dtype) for one in (*each, *_recurrent(config, work)))
    *encoders, last = stacks_of(config, work)
    states = Kept(wide=last.n_rows * config.d_model)
    source = Kept(wide=work.batch * work.n_source * config.d_model) if isinstance(config, Seq2SeqConfig) else NOTHING
    keeps = work.mode in (Mode.PREFILL, Mode.DECODE)
    moments = [_outside(one, config, work, states=states) + source for one in made if one.name == LOGITS]
    moments += [one + source for one in _in_blocks(last, keeps=keeps)]
    moments += [Kept(wide=one.reads + one.writes) for one in made if not one.is_block and one.name != LOGITS]
    before = [one for stack in encoders for one in (*_in_blocks(stack, keeps=False), _before_blocks(stack))]
    before.append(_before_blocks(last) + source)
    held = [one.n_bytes(work.dtype) for one in moments]
    return max([*held, *(one.n_bytes(work.dtype) - source_cache for one in before)])


def _outside(one: Operation, config: ModelConfig, work: Workload, *, states: Kept) -> Kept:
    """Logits, beside all states; rows that were chosen or made from them (a BERT's head) are copies."""
    is_copy = isinstance(config, BERTConfig) or work.n_predicted < work.n_tokens
    return states + Kept(numbers=one.writes + (one.reads if is_copy else 0))


def _in_blocks(stack: Stack, *, keeps: bool) -> list[Kept]:
    """`keeps`: keys and values go into a cache, which is counted by itself."""
    x = stack.n_rows * stack.config.d_model
    is_pre = stack.config.norm_position is NormPosition.PRE
    below = Kept(wide=min(2, stack.n_layers) * x) + _relation(stack)
    adding = Kept(wide=x, numbers=x) + (NOTHING if is_pre else _norming(stack, x))
    given = Kept(wide=x) if is_pre else NOTHING
    moments = [below + given + one for one in _attention(stack, "attention", keeps=keeps)] + [below + adding]
    middle = below + Kept(wide=x)
    if stack.n_source is not None:
        moments += [middle + given + one for one in _attention(stack, "cross", keeps=keeps)]
    hidden = stack.n_rows * stack.config.d_ff
    activated = Kept(numbers=(3 if stack.config.gated else 2) * hidden)
    return [*moments, middle + given + activated, middle + given + Kept(numbers=hidden + x), middle + adding]


def _recurrent(config: RNNConfig, work: Workload) -> list[Kept]:
    """The decoder's attention, which has no fused kernel: beside it stand its input, its states and the source."""
    if config.attention is ScoreKind.NONE:
        return []
    target, source = (work.batch * n * config.d_model for n in (work.n_new, work.n_source))
    square = work.batch * work.n_new * work.n_source
    has_keys = config.attention in PROJECTED
    beside = Kept(numbers=2 * target + (0 if work.mode is Mode.DECODE else source * (1 + has_keys)))
    moments = [beside + Kept(numbers=SQUARES * square)]
    if config.attention is ScoreKind.ADDITIVE:
        # Query plus key, and its tanh.
        moments.append(beside + Kept(numbers=2 * square * config.d_model))
    return moments


def _before_blocks(stack: Stack) -> Kept:
    """What is made once for all of them, beside the first one's input."""
    pairs, config = stack.n_queries * stack.n_keys, stack.config
    has_window = config.sliding_window is not None
    is_learned = config.positions is PositionKind.RELATIVE
    at_once = BUCKETING + has_window if is_learned else MASKING if has_window else 0
    return Kept(wide=stack.n_rows * config.d_model, flags=at_once * pairs)


def _norming(stack: Stack, x: int) -> Kept:
    """A post-norm block norms the sum while it still holds both parts; an RMSNorm on a CPU has a copy on the way."""
    is_layer = stack.config.norm is NormKind.LAYER
    return Kept(wide=x * (1 if is_layer or stack.on_gpu else 2) + stack.n_rows * (2 if is_layer else 1))


def _relation(stack: Stack) -> Kept:
    """What all blocks share: angles at 32 bits, a bias, a mask that is more than a triangle."""
    config, pairs = stack.config, stack.n_queries * stack.n_keys
    table = pairs if config.sliding_window is not None else 0
    match config.positions:
        case PositionKind.ROTARY:
            return Kept(flags=8 * stack.n_queries * config.d_head + table)
        case _ if config.positions in BIASED:
            return Kept(wide=config.n_heads * pairs, flags=table)
        case _:
            return Kept(flags=table)


def _attention(stack: Stack, which: str, *, keeps: bool) -> list[Kept]:
    """Beside the stream: projecting, turning, looking up, and writing out."""
    config, rows, is_self = stack.config, stack.n_rows, which == "attention"
    m = stack.n_keys if is_self else stack.n_source or 0
    query = rows * config.n_heads * config.d_head
    # A step's own keys and values are made beside the cache; a source's are the cache's own.
    n_new = 0 if keeps and not is_self else stack.batch * (stack.n_queries if is_self else m)
    key, value = (n_new * config.n_kv_heads * width for width in (config.d_head, config.d_value))
    is_turned = is_self and config.positions is PositionKind.ROTARY
    queries = query * (2 if is_turned else 1)
    looked_at = 0 if keeps else key + value
    results = rows * config.n_heads * config.d_value
    moments = [
        Kept(numbers=queries + key + value),
        Kept(numbers=queries + looked_at) + _looking(stack, m, results=results, is_self=is_self),
    ]
    if is_turned:
        turned = max((1 + TURNING) * query, queries + value + (1 + TURNING) * key)
        moments.append(Kept(numbers=turned))
    # Side by side they are a view of the fused kernel's results alone, all others are copied.
    is_view = config.head_layout is HeadLayout.SPLIT and stack.kernel is Kernel.FUSED
    is_view = is_view and not (is_self and _is_masked_by_table(stack))
    joined = 0 if is_view else results if config.head_layout is HeadLayout.SPLIT else rows * config.d_value
    written = rows * config.d_model if config.output_projection else 0
    return [*moments, Kept(numbers=queries + looked_at + results + joined + written)]


def _looking(stack: Stack, m: int, *, results: int, is_self: bool) -> Kept:
    config, pairs = stack.config, stack.n_queries * m
    square = stack.batch * config.n_heads * pairs
    looks = stack.n_rows * config.n_heads
    key = stack.batch * m * config.n_heads * config.d_head
    if stack.kernel is Kernel.PLAIN:
        # Keys and values are repeated for the heads that share them, also where each head has its own.
        repeated = max(key, stack.batch * m * config.n_heads * config.d_value)
        return Kept(numbers=max(SQUARES * square, square + repeated), flags=looks)
    if not stack.on_gpu and config.d_head != config.d_value:
        # For these torch has no fused kernel on a CPU. Of scores and softmax there are two, and where they are −∞.
        mask = pairs if is_self and stack.causal else 0
        return Kept(numbers=mask + max(2 * square + looks * config.d_head, key), flags=square + looks)
    if not (is_self and _is_masked_by_table(stack)):
        return Kept(numbers=results, wide=looks)
    # Of the results a copy, in which rows that see nothing are zero; the mask, written into the bias or by itself: then
    # the kernel has made numbers of it before. A window's own table is counted with what all blocks share.
    if config.positions in BIASED:
        mask = pairs if config.sliding_window is None else 0
        return Kept(numbers=2 * results, wide=config.n_heads * pairs, flags=mask)
    return Kept(numbers=results + max(results, pairs), flags=pairs)


def _is_masked_by_table(stack: Stack) -> bool:
    """The fused kernel draws a triangle itself, unless there is a bias beside it."""
    return stack.config.sliding_window is not None or (stack.causal and stack.config.positions in BIASED)
