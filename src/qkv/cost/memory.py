"""How many bytes a step holds, by class, and the most it holds at one time."""

from dataclasses import asdict, dataclass

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.moments import most_held
from qkv.cost.operation import Operation
from qkv.cost.parameters import parameters
from qkv.cost.recurrent import PROJECTED, STATES
from qkv.cost.timeline import held, peaks, weight_casts
from qkv.cost.update import shard, update_of
from qkv.cost.workload import Mode, Precision, Sharding, Workload

WORKSPACE = 2 * 32 * 2**20
"""cuBLAS's own, as torch gives it on Hopper and Blackwell: 32 MiB for the forward thread, 32 for the backward one."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by class, on each device.

    Weights, gradients, optimizer and cache are exact. Activations in training are what autograd keeps from forward
    to backward: every tensor once; in inference, what is held at the worst moment of a pass, see `moments`. The peak
    is the largest moment of a step, see `timeline`; ids are in it too.
    """

    weights: int
    averaged: int = 0
    """The running average of the weights."""
    casts: int = 0
    """Copies of the weights at 16 bits that mixed precision makes."""
    gradients: int = 0
    optimizer: int = 0
    """AdamW's two moments, Muon's one."""
    activations: int = 0
    working: int = 0
    """What comes and goes at the peak: the loss's logits, gradients on their way, an optimizer's copies."""
    workspace: int = 0
    """cuBLAS's."""
    gathered: int = 0
    """FSDP: weights that are whole for a while, those outside the blocks and two blocks' worth."""
    cache: int = 0
    peak: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def memory_of(made: list[Operation], config: ModelConfig, work: Workload) -> Memory:
    # Not of `made` alone: a cached step leaves out parts that are held all the same.
    n_parameters = parameters(config).total
    if work.mode is Mode.TRAIN:
        return _training(made, config, work, n_parameters)
    weights = n_parameters * work.dtype.wide
    casts = weight_casts(made, work)
    passes = [work]
    if work.mode is Mode.GENERATE:
        sizes = ((Mode.PREFILL, work.length), (Mode.DECODE, work.last_length))
        passes = [work.replace(mode=mode, new=None, predictions=1, length=n) for mode, n in sizes]
    cache = of_source = 0
    if work.mode in (Mode.PREFILL, Mode.DECODE, Mode.GENERATE):
        lengths = {"length": work.last_length, "source_length": work.n_source}
        cache = cache_bytes(config, batch=work.batch, **lengths, dtype=work.dtype)
        if isinstance(config, Seq2SeqConfig):
            of_source = cache_bytes(config, batch=work.batch, length=0, source_length=work.n_source, dtype=work.dtype)
    activations = max(most_held(config, one, source_cache=of_source) for one in passes)
    return Memory(
        weights=weights, casts=casts, activations=activations, cache=cache,
        peak=weights + casts + activations + cache + _inputs(config, work),
    )  # fmt: skip


def cache_bytes(
    config: ModelConfig, *, batch: int, length: int, source_length: int | None = None,
    dtype: Precision = Precision.FLOAT32,
) -> int:  # fmt: skip
    """Keys and values of `length` tokens a row, and of the source.

    An RNN keeps the source's states, their keys where they are projected, and its own states.
    """
    n_source = length if source_length is None else source_length
    match config:
        case GPTConfig():
            numbers = config.n_layers * length * _kv_width(config)
        case Seq2SeqConfig():
            numbers = config.n_decoder_layers * (length + n_source) * _kv_width(config)
        case RNNConfig():
            kept = n_source * (1 + (config.attention in PROJECTED))
            numbers = (kept + STATES[config.cell] * config.n_decoder_layers) * config.d_model
        case BERTConfig():
            numbers = 0
    return batch * numbers * dtype.narrow


def _kv_width(config: TransformerConfig) -> int:
    return config.n_kv_heads * (config.d_head + config.d_value)


def _training(made: list[Operation], config: ModelConfig, work: Workload, n_parameters: int) -> Memory:
    n_shards = work.n_devices if work.sharding is Sharding.FSDP else 1
    size = work.dtype.wide
    update = update_of(made, n_parameters, work)
    always = {
        "weights": shard(n_parameters, n_shards) * size,
        "averaged": shard(n_parameters, n_shards) * size if work.averaging else 0,
        "optimizer": update.kept_numbers * size,
        "workspace": WORKSPACE if work.on_gpu else 0,
        "gathered": _gathered(made) * size if n_shards > 1 else 0,
    }
    between = held(made, work)
    gradients = shard(n_parameters, n_shards) * size
    moments = peaks(made, config, work, gradients=gradients)
    moments["update"] = gradients + update.working_bytes(work.dtype, on_gpu=work.on_gpu)
    top = max(moments.values())
    return Memory(
        **always,
        casts=between.casts,
        gradients=gradients,
        activations=between.activations,
        working=max(0, top - between.activations - between.casts),
        peak=sum(always.values()) + _inputs(config, work) + top,
    )


def _inputs(config: ModelConfig, work: Workload) -> int:
    """Ids 8 bytes each, in training as many targets, else the positions of one row; the numbers of a patch, 4 each."""
    match config:
        case _ if work.mode is Mode.DECODE:
            of_source = 0
        case Seq2SeqConfig(d_patch=int(d_patch)):
            of_source = 4 * d_patch * work.n_source
        case Seq2SeqConfig() | RNNConfig():
            of_source = 8 * work.n_source
        case _:
            of_source = 0
    beside = work.n_tokens if work.mode is Mode.TRAIN else work.n_new
    return work.batch * of_source + 8 * (work.n_tokens + beside)


def _gathered(made: list[Operation]) -> int:
    outside = sum(one.n_parameters for one in made if not one.is_block)
    of_a_block: dict[str, int] = {}
    for one in (one for one in made if one.is_block):
        stack = one.part.split("blocks")[0]
        of_a_block[stack] = of_a_block.get(stack, 0) + one.parameters
    return outside + 2 * max(of_a_block.values(), default=0)
