"""Settings of the step to estimate, such as batch size, sequence length, precision and mode."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from qkv.choices import AttentionKernel, OptimizerKind
from qkv.config import BERTConfig, Config, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import ConfigError, ContextLengthError

MAX_SIZE = 10**15
"""Largest accepted size. Larger values are almost certainly typos."""
Size = Annotated[int, Field(strict=True, ge=1, le=MAX_SIZE)]


class Mode(StrEnum):
    """The type of step to estimate."""

    TRAIN = "train"
    """One training step: forward pass, backward pass and optimizer update."""
    FORWARD = "forward"
    """One forward pass over full sequences without a KV cache."""
    PREFILL = "prefill"
    """One forward pass over full sequences that fills the KV cache."""
    DECODE = "decode"
    """One decode step with a KV cache. `seq_len` includes the new token."""
    GENERATE = "generate"
    """Prefill of a prompt of `seq_len` tokens, followed by decode steps. The prefill yields the first of
    `n_new_tokens`."""

    @property
    def pass_name(self) -> str:
        """The last part of the names of calibration tables, which are measured with or without a backward pass."""
        return "train" if self is Mode.TRAIN else "infer"


class DeviceType(StrEnum):
    """The type of device, which affects what some kernels save for the backward pass but not the FLOPs."""

    CPU = "cpu"
    CUDA = "cuda"


class Sharding(StrEnum):
    """The data-parallel strategy for training on several devices."""

    DDP = "ddp"
    """Every device holds all weights. Gradients are averaged with an all-reduce."""
    FSDP = "fsdp"
    """Weights, gradients and optimizer state are sharded. Weights are all-gathered in the forward and backward
    passes."""


class Precision(StrEnum):
    """The floating-point precision of a workload."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    MIXED = "mixed"
    """Weights, gradients and optimizer state use float32, and matmuls use 16 bits (torch.autocast)."""

    @property
    def matmul_itemsize(self) -> int:
        """Number of bytes per element in matmul inputs and outputs."""
        return 4 if self is Precision.FLOAT32 else 2

    @property
    def training_precision(self) -> "Precision":
        """The precision for training a model that runs inference in this precision."""
        return Precision.FLOAT32 if self is Precision.FLOAT32 else Precision.MIXED

    @property
    def param_itemsize(self) -> int:
        """Bytes per element in weights, gradients, optimizer state and tensors that autocast keeps in float32."""
        return 2 if self in (Precision.FLOAT16, Precision.BFLOAT16) else 4


class Workload(Config):
    """The settings of one step. Invalid sizes and combinations raise `ConfigError` on construction."""

    batch_size: Size
    seq_len: Size
    """Number of tokens per sequence. For models with a source, this is the length of the target."""
    source_len: Size | None = None
    """Number of tokens per source sequence (default: `seq_len`). Only valid for models that encode a source."""
    mode: Mode = Mode.FORWARD
    dtype: Precision = Precision.FLOAT32
    kernel: AttentionKernel = AttentionKernel.FUSED
    activation_checkpointing: bool = False
    """If True, save only the input of each block and recompute the block in the backward pass."""
    loss_chunk_size: Size | None = None
    """Number of positions whose logits are in memory at a time, or None to compute all logits at once. With chunks, the
    gradients are computed in the forward pass."""
    accumulation_steps: Size = 1
    """Number of micro-batches per optimizer update. All other numbers refer to one micro-batch."""
    n_new_tokens: Size | None = None
    """Number of tokens generated per sequence with mode=generate."""
    logits_to_keep: Size | None = None
    """Number of positions per sequence whose logits are computed, for example 15 % of them in masked language modeling.
    None means all positions, or only the last prompt position with mode=generate."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    ema: bool = False
    """If True, keep an exponential moving average of the weights."""
    n_devices: Size = 1
    sharding: Sharding = Sharding.DDP
    device_type: DeviceType = DeviceType.CUDA

    @model_validator(mode="after")
    def _check_mode_fields(self) -> Self:
        training_only = {
            "activation_checkpointing": self.activation_checkpointing,
            "loss_chunk_size": self.loss_chunk_size is not None,
            "accumulation_steps": self.accumulation_steps > 1,
            "ema": self.ema,
            "n_devices": self.n_devices > 1,
        }
        for name, is_set in training_only.items():
            if is_set and self.mode is not Mode.TRAIN:
                raise ConfigError(f"{name} requires mode=train, got mode={self.mode.value}")
        if (self.n_new_tokens is None) == (self.mode is Mode.GENERATE):
            raise ConfigError(
                f"n_new_tokens must be set if and only if mode=generate, got mode={self.mode.value} and "
                f"n_new_tokens={self.n_new_tokens}"
            )
        if self.logits_to_keep is not None and self.logits_to_keep > self.n_queries:
            raise ConfigError(
                f"logits_to_keep must be at most {self.n_queries}, the number of positions computed per sequence, got "
                f"{self.logits_to_keep}"
            )
        return self

    @property
    def n_tokens(self) -> int:
        """Number of target positions computed in one step for the full batch."""
        return self.batch_size * self.n_queries

    @property
    def n_queries(self) -> int:
        """Number of target positions per sequence computed in one step."""
        return 1 if self.mode is Mode.DECODE else self.seq_len

    @property
    def n_logit_rows(self) -> int:
        """Number of positions in the full batch whose logits are computed in one step."""
        return self.n_tokens if self.logits_to_keep is None else self.batch_size * self.logits_to_keep

    @property
    def final_seq_len(self) -> int:
        """Number of tokens per sequence in the cache at the end.

        The last generated token is never fed back to the model.
        """
        return self.seq_len + (self.n_new_tokens or 1) - 1

    @property
    def on_gpu(self) -> bool:
        return self.device_type is DeviceType.CUDA

    @property
    def n_source(self) -> int:
        """Number of tokens per source sequence, which is `seq_len` if `source_len` is not set."""
        return self.seq_len if self.source_len is None else self.source_len

    def check_supported_by(self, config: ModelConfig) -> None:
        """Raise an error if a model with this config cannot run the workload."""
        for name, size in config.model_dump().items():
            if isinstance(size, int) and size > MAX_SIZE:
                raise ConfigError(f"{name} must be at most {MAX_SIZE}, got {size}")
        has_source = isinstance(config, Seq2SeqConfig | RNNConfig)
        if self.source_len is not None and not has_source:
            raise ConfigError(
                f"source_len is not supported for family={config.family}, which has no source, got {self.source_len}"
            )
        if self.mode in (Mode.DECODE, Mode.PREFILL, Mode.GENERATE):
            if isinstance(config, BERTConfig):
                raise ConfigError(f"mode={self.mode.value} requires a KV cache, which family=bert does not support")
            if isinstance(config, GPTConfig) and not config.causal:
                raise ConfigError(f"mode={self.mode.value} requires a KV cache, which causal=False does not support")
        target = (
            "seq_len" if self.n_new_tokens is None else f"seq_len={self.seq_len} + n_new_tokens={self.n_new_tokens} - 1"
        )
        for name, n in ((target, self.final_seq_len), ("source_len", self.n_source if has_source else 1)):
            if n > config.context_length:
                raise ContextLengthError(
                    f"{name} must be at most the model's context_length={config.context_length}, got {n}"
                )
