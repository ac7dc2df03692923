"""Estimate the peak memory use of a step and its breakdown by category."""

from dataclasses import asdict, dataclass

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.operation import Operation
from qkv.cost.optimizer_update import shard_size, split_device_parameters_by_optimizer
from qkv.cost.parameters import count_parameters
from qkv.cost.peak_activations import peak_inference_activation_bytes
from qkv.cost.rnn import KEY_PROJECTING_SCORES, STATES_PER_CELL
from qkv.cost.training_memory import loss_block_embedding_peak_bytes, saved_recomputed_and_cast_bytes, weight_cast_bytes
from qkv.cost.workload import Mode, Precision, Sharding, Workload

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
