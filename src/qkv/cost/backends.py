"""Decide which backend runs a workload, without importing torch.

The rules match those of `supports` in `accel`, but they see only the config, the precision and the device. A model that
has hooks or quantized weights may run on another backend than this module predicts.
"""

from qkv.choices import AttentionKernel, BackendName, HeadCombination, NormKind, NormPosition, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.operations import list_operations
from qkv.cost.workload import Mode, Precision, Workload
from qkv.errors import InputError

RELATIVE_POSITIONS = (PositionKind.ROTARY, PositionKind.ALIBI, PositionKind.RELATIVE)
"""Position encodings that act on the attention scores instead of the embeddings."""
MIN_ONEDNN_ELEMENTS = 2**17
"""Number of elements from which a weight matrix is multiplied with oneDNN during training."""


def select_backend(config: ModelConfig, workload: Workload, device: str, backend: str = BackendName.AUTO) -> str:
    """Return the name of the backend that runs the workload on a device of type `cpu` or `cuda`.

    `backend` is the requested backend. Raises `InputError` if it does not support the workload.
    """
    fastest = _fastest_backend(config, workload, device)
    if backend in (BackendName.AUTO, fastest):
        return fastest
    if backend not in tuple(BackendName):
        raise InputError(f"--backend {backend}: must be one of {', '.join(BackendName)}")
    if backend != BackendName.EAGER:
        raise InputError(
            f"--backend {backend}: does not run family={config.family} with mode={workload.mode.value} and "
            f"dtype={workload.dtype.value} on a device of type {device}"
        )
    return BackendName.EAGER


def is_captured(config: ModelConfig, workload: Workload, backend: str) -> bool:
    """Return True if the backend replays the step as a CUDA graph, so that it does not launch every kernel."""
    return backend == BackendName.CUDA and isinstance(config, GPTConfig) and workload.mode is Mode.DECODE


def _fastest_backend(config: ModelConfig, workload: Workload, device: str) -> str:
    is_supported = not (isinstance(config, TransformerConfig) and workload.kernel is AttentionKernel.EAGER) and (
        _cuda_supports(config, workload) if device == "cuda" else _cpu_supports(config, workload)
    )
    return (BackendName.CUDA if device == "cuda" else BackendName.CPU) if is_supported else BackendName.EAGER


def _cpu_supports(config: ModelConfig, workload: Workload) -> bool:
    if workload.dtype is not Precision.FLOAT32:
        return False
    match workload.mode, config:
        case Mode.TRAIN, _:
            # The oneDNN linears pay off only if all batches have the same shape.
            is_supported = isinstance(config, GPTConfig) and not workload.activation_checkpointing
            return is_supported and _largest_weight_matrix(config, workload) >= MIN_ONEDNN_ELEMENTS
        case Mode.FORWARD, BERTConfig():
            return (
                _has_known_modules(config)
                and config.positions not in RELATIVE_POSITIONS
                and config.sliding_window is None
                and not config.gated
            )
        case Mode.FORWARD, _:
            return False
        case _, RNNConfig():
            return True
        case _:
            return _has_known_modules(config) and config.positions is not PositionKind.CONCATENATED


def _cuda_supports(config: ModelConfig, workload: Workload) -> bool:
    match workload.mode, config:
        case Mode.TRAIN, _:
            return True
        case Mode.FORWARD, BERTConfig():
            return (
                workload.dtype in (Precision.BFLOAT16, Precision.FLOAT16)
                and _has_known_modules(config)
                and config.positions not in RELATIVE_POSITIONS
                and config.sliding_window is None
                and config.scale_scores
                and (config.n_heads, config.d_head) == (config.n_kv_heads, config.d_value)
            )
        case Mode.FORWARD, _:
            return isinstance(config, GPTConfig)
        case _, GPTConfig():
            return (
                _has_known_modules(config)
                and config.causal
                and config.sliding_window is None
                and not config.embedding_norm
                and config.norm_position is NormPosition.PRE
                and config.positions not in (PositionKind.CONCATENATED, PositionKind.ALIBI, PositionKind.RELATIVE)
            )
        case _:
            return isinstance(config, Seq2SeqConfig | RNNConfig)


def _has_known_modules(config: ModelConfig) -> bool:
    return (
        isinstance(config, TransformerConfig)
        and config.head_combination is HeadCombination.SPLIT
        and config.norm in (NormKind.LAYER, NormKind.RMS)
    )


def _largest_weight_matrix(config: ModelConfig, workload: Workload) -> int:
    """Return the number of elements of the largest weight matrix of a linear layer."""
    operations = list_operations(config, workload)
    return max(op.matmul.inner * op.matmul.columns for op in operations if op.matmul is not None and op.weights)
