"""The CUDA backend, which runs all model families on an NVIDIA GPU."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qkv.accel.cuda.decode_engine import CUDADecodeEngine
from qkv.accel.cuda.decode_pool import CUDADecodeStepPool
from qkv.accel.cuda.fused_modules import find_fused_replacement
from qkv.accel.cuda.packed_encoder import PackedEncoder
from qkv.accel.support import reason_modules_are_unsupported
from qkv.accel.swap import EngineWithModules, ModuleSwap
from qkv.choices import BackendName, NormPosition
from qkv.config import TrainingConfig
from qkv.generation.decode_engine import DecodeEngine, eager_engine
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Block
from qkv.nn.positions import ConcatenatedSinusoidalPositions, RotaryEmbedding
from qkv.utils import CUDNN_TF32_DISABLED


@dataclass(frozen=True, eq=False)
class CUDABackend:
    """Backend for models on an NVIDIA GPU.

    A GPT is decoded with Triton kernels, and its captured decode steps are kept for as long as the model exists. The
    texts of a BERT are packed without padding. Encoder–decoders run the reference with fused modules, and RNNs run it
    in full float32 precision.
    """

    name = BackendName.CUDA
    device_type = "cuda"

    _lock: Lock = field(default_factory=Lock)
    _pools: WeakKeyDictionary[nn.Module, CUDADecodeStepPool] = field(default_factory=WeakKeyDictionary)

    def supports(self, model: Model) -> str | None:
        """Return `None` if the backend can run the model, and otherwise the reason why it cannot."""
        match model:
            case GPT():
                if find_spec("triton") is None:
                    return "requires Triton, which is not installed (PyTorch builds for Linux and CUDA include it)"
                return reason_kernels_are_unsupported(model)
            case BERT():
                return reason_varlen_is_unsupported(model)
            case Seq2Seq() | RNNSeq2Seq():
                return "requires evaluation mode (model.eval())" if model.training else None

    def supports_training(self, model: nn.Module, config: TrainingConfig) -> str | None:  # noqa: ARG002
        return None

    def decode_engine(self, model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine:
        match model:
            case GPT():
                with self._lock:
                    pool = self._pools.setdefault(model, CUDADecodeStepPool())
                return CUDADecodeEngine(model, pool, batch=batch, capacity=capacity)
            case Seq2Seq():
                # Only the encoder has enough tokens for the fused modules to pay off.
                eager = eager_engine(model, batch=batch, capacity=capacity)
                return EngineWithModules(eager, ModuleSwap(model, find_fused_replacement))
            case RNNSeq2Seq():
                eager = eager_engine(model, batch=batch, capacity=capacity)
                return EngineWithModules(eager, CUDNN_TF32_DISABLED, CUDNN_TF32_DISABLED)

    def encode_engine(self, model: BERT, *, compile: bool = False) -> PackedEncoder:  # noqa: A002 - torch's term
        return PackedEncoder(model, compiled=compile)


def reason_kernels_are_unsupported(model: GPT) -> str | None:
    """Return why the Triton decode kernels cannot run this GPT, or `None` if they can."""
    config, embedding = model.config, model.embedding
    conditions = {
        "requires evaluation mode (model.eval())": not model.training,
        "causal=false is not supported": config.causal,
        "sliding_window is not supported": config.sliding_window is None,
        "embedding_norm is not supported": embedding.norm is None,
        f"positions={config.positions.value!r} is not supported": not isinstance(
            embedding.position, ConcatenatedSinusoidalPositions
        )
        and (model.relative_positions is None or isinstance(model.relative_positions, RotaryEmbedding)),
        "norm_position='post' is not supported": all(
            block.norm_position is NormPosition.PRE for block in model.blocks if isinstance(block, Block)
        ),
    }
    reason = next((reason for reason, is_met in conditions.items() if not is_met), None)
    return reason or reason_modules_are_unsupported([("", model)], (nn.Linear,))


def reason_varlen_is_unsupported(model: BERT) -> str | None:
    """Return why PyTorch's variable-length attention kernel cannot run this BERT, or `None` if it can."""
    weight, config = model.embedding.token.weight, model.config
    conditions = {
        "requires evaluation mode (model.eval())": not model.training,
        f"requires 16-bit weights, got {weight.dtype}": weight.dtype in (torch.bfloat16, torch.float16),
        f"positions={config.positions.value!r} is not supported for an encoder": model.relative_positions is None,
        "sliding_window is not supported for an encoder": config.sliding_window is None,
        "scale_scores=false is not supported for an encoder": config.scale_scores,
        "requires as many key/value heads as query heads, of equal width": (config.n_heads, config.d_head)
        == (config.n_kv_heads, config.d_value),
        f"requires a d_head that is a multiple of 8 and at most 256, got {config.d_head}": config.d_head % 8 == 0
        and config.d_head <= 256,
    }
    reason = next((reason for reason, is_met in conditions.items() if not is_met), None)
    # The packed forward pass skips the taps and the masks of the reference.
    parts = ("embedding", "blocks", "final_norm", "last_hidden_state")
    return reason or reason_modules_are_unsupported([(part, model.get_submodule(part)) for part in parts], None)
