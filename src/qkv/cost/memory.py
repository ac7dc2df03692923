"""How many bytes a step holds, by class; and how many it moves."""

from dataclasses import asdict, dataclass

from qkv.choices import CellKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.operation import LOGITS, NOTHING, Operation
from qkv.cost.parameters import parameters, parameters_of
from qkv.cost.workload import Mode, Precision, Workload

ADAM_MOMENTS = 2
ADAM_MOVES = 7
"""Numbers AdamW moves a parameter: reads weight, gradient and two moments, writes weight and moments."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by class.

    Weights, gradients, optimizer (AdamW's two moments) and cache are exact. Activations in training are what
    autograd keeps from forward to backward, to about 10 %: every tensor once, ids and temporary copies left
    out; in inference, the inputs and results of the largest operation. Working memory is what the loss needs
    besides: two more sets of logits' size for their gradient, or three of a chunk's.
    """

    weights: int
    casts: int = 0
    """Copies of the weights at 16 bits that mixed precision makes."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    working: int = 0
    cache: int = 0
    peak: int = 0
    """Most at one time: gradients fill up while activations empty, unless they wait for an accumulated update."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def memory_of(made: list[Operation], config: ModelConfig, work: Workload) -> Memory:
    # Not of `made` alone: a cached step leaves out parts that are held all the same.
    weights = parameters(config).total * work.dtype.wide
    if work.mode is Mode.TRAIN:
        return _training(made, work, weights)
    activations = max(one.reads + one.writes - one.inside_reads - one.inside_writes for one in made) * work.dtype.narrow
    casts = _casts(made, work)
    cache = 0
    if work.mode in (Mode.PREFILL, Mode.DECODE):
        cache = cache_bytes(config, batch=work.batch, length=work.length, source_length=work.n_source, dtype=work.dtype)
    return Memory(
        weights=weights, casts=casts, activations=activations, cache=cache, peak=weights + casts + activations + cache
    )


def cache_bytes(
    config: ModelConfig, *, batch: int, length: int, source_length: int | None = None,
    dtype: Precision = Precision.FLOAT32,
) -> int:  # fmt: skip
    """Keys and values of `length` tokens a row, and of the source; an RNN keeps the source's states and its own."""
    n_source = length if source_length is None else source_length
    match config:
        case GPTConfig():
            numbers = config.n_layers * length * _kv_width(config)
        case Seq2SeqConfig():
            numbers = config.n_decoder_layers * (length + n_source) * _kv_width(config)
        case RNNConfig():
            n_states = 1 if config.cell is CellKind.GRU else 2
            numbers = (n_source + n_states * config.n_decoder_layers) * config.d_model
        case BERTConfig():
            numbers = 0
    return batch * numbers * dtype.narrow


def _kv_width(config: TransformerConfig) -> int:
    return config.n_kv_heads * (config.d_head + config.d_value)


def _training(made: list[Operation], work: Workload, weights: int) -> Memory:
    activations = _kept_bytes(made, work)
    working = _loss_bytes(made, work)
    casts = _casts(made, work)
    gradients, optimizer = weights, ADAM_MOMENTS * weights
    live = activations + working
    live = live + gradients if work.accumulation > 1 else max(live, gradients)
    return Memory(
        weights=weights,
        casts=casts,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        working=working,
        peak=weights + casts + optimizer + live,
    )


def _kept_bytes(made: list[Operation], work: Workload) -> int:
    outside, blocks, inputs = NOTHING, {}, NOTHING
    for one in made:
        if work.loss_chunk is not None and one.name == LOGITS:
            continue
        if work.checkpointing and one.is_block:
            # Each stack's blocks are computed again one at a time; the largest one counts.
            stack = one.part.split("blocks")[0]
            blocks[stack] = blocks.get(stack, NOTHING) + one.kept * one.steps
            if one.part.endswith("feedforward_write"):
                inputs = inputs + one.kept * one.copies
        else:
            outside = outside + one.kept * one.runs
    sizes = {"narrow": work.dtype.narrow, "wide": work.dtype.wide}
    again = max((kept.n_bytes(**sizes) for kept in blocks.values()), default=0)
    return (outside + inputs).n_bytes(**sizes) + again


def _loss_bytes(made: list[Operation], work: Workload) -> int:
    largest = max((one for one in made if one.name == LOGITS), key=lambda one: one.writes, default=None)
    if largest is None:
        return 0
    if work.loss_chunk is None:
        return 2 * largest.writes * work.dtype.wide
    n_words = largest.writes // work.n_tokens
    return 3 * min(work.loss_chunk, work.n_tokens) * n_words * work.dtype.wide


def _casts(made: list[Operation], work: Workload) -> int:
    if work.dtype is not Precision.MIXED:
        return 0
    return sum(one.weights * one.copies for one in made if one.product is not None) * work.dtype.narrow


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes moved by the forward pass; a weight is read once a run.

    `unfused`: every operation reads and writes. `fused`: attention reads Q, K, V and writes its result, never n×n.
    """

    weights: int
    cache: int
    unfused: int
    fused: int
    update: int = 0
    """Bytes AdamW moves in a training step: 28 a parameter at 32 bits."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def traffic_of(made: list[Operation], work: Workload) -> Traffic:
    size = work.dtype.narrow
    is_training = work.mode is Mode.TRAIN
    return Traffic(
        weights=sum(one.weights * one.runs for one in made) * size,
        cache=sum(one.cache * one.runs for one in made) * size,
        unfused=sum(one.moved(fused=False) for one in made) * size,
        fused=sum(one.moved(fused=True) for one in made) * size,
        update=ADAM_MOVES * parameters_of(made).total * work.dtype.wide if is_training else 0,
    )
