"""What is asked of a model: how much text at once, at which precision, and whether to train."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from qkv.choices import Kernel, OptimizerKind
from qkv.config import BERTConfig, Config, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import ConfigError, ContextLengthError

HUGE = 10**15
"""Beyond this a size is a slip of the finger."""
Size = Annotated[int, Field(strict=True, ge=1, le=HUGE)]


class Mode(StrEnum):
    TRAIN = "train"
    """One step: forward, backward, update."""
    FORWARD = "forward"
    """One pass over whole sequences, nothing kept."""
    PREFILL = "prefill"
    """The same, keys and values kept in a cache."""
    DECODE = "decode"
    """One new token a row, with the cache; `length` counts the new one too."""
    GENERATE = "generate"
    """A prompt of `length` tokens, then `new` tokens more: the prompt's pass gives the first of them."""


class Backend(StrEnum):
    """On what torch computes; it decides what some kernels keep, and no FLOP."""

    CPU = "cpu"
    CUDA = "cuda"


class Sharding(StrEnum):
    """What several devices share."""

    DDP = "ddp"
    """Each holds all; gradients are added up (all-reduce)."""
    FSDP = "fsdp"
    """Each holds a part of weights, gradients and optimizer; weights are gathered for use (all-gather, twice)."""


class Precision(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    MIXED = "mixed"
    """Weights, gradients and optimizer at 32 bits, products at 16 (torch.autocast)."""

    @property
    def narrow(self) -> int:
        """Bytes of a number in a product."""
        return 4 if self is Precision.FLOAT32 else 2

    @property
    def in_training(self) -> "Precision":
        """How a model is trained whose inference is at this precision."""
        return Precision.FLOAT32 if self is Precision.FLOAT32 else Precision.MIXED

    @property
    def wide(self) -> int:
        """Bytes of a weight, a gradient, an optimizer's moment, or a number that mixed precision keeps wide."""
        return 2 if self in (Precision.FLOAT16, Precision.BFLOAT16) else 4


class Workload(Config):
    """One step's work; sizes that cannot be are refused here, in one line."""

    batch: Size
    length: Size
    """Tokens a row; the target's, where there is a source."""
    source_length: Size | None = None
    """As long as the target unless said; only models that read a source have one."""
    mode: Mode = Mode.FORWARD
    dtype: Precision = Precision.FLOAT32
    kernel: Kernel = Kernel.FUSED
    checkpointing: bool = False
    """Keep a block's input alone and compute the block again in backward."""
    loss_chunk: Size | None = None
    """Tokens whose logits are held at once; their gradients are made in the forward pass. None: all are held."""
    accumulation: Size = 1
    """Batches whose gradients are added up for one update; all other numbers are one batch's."""
    new: Size | None = None
    """Tokens a row that mode=generate writes."""
    predictions: Size | None = None
    """Positions a row whose logits are computed: about 15 % of them where BERT is trained on masked words.
    None: all; in mode=generate the prompt's last alone."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    averaging: bool = False
    """Keep a running average of the weights beside them."""
    n_devices: Size = 1
    sharding: Sharding = Sharding.DDP
    backend: Backend = Backend.CUDA

    @model_validator(mode="after")
    def _agree(self) -> Self:
        of_training = {
            "checkpointing": self.checkpointing,
            "loss_chunk": self.loss_chunk is not None,
            "accumulation": self.accumulation > 1,
            "averaging": self.averaging,
            "n_devices": self.n_devices > 1,
        }
        for name in (name for name, is_asked in of_training.items() if is_asked and self.mode is not Mode.TRAIN):
            raise ConfigError(f"{name} belongs to mode=train, not mode={self.mode.value}")
        if (self.new is None) == (self.mode is Mode.GENERATE):
            raise ConfigError(
                f"mode=generate needs new, and no other mode has it: mode={self.mode.value}, new={self.new}"
            )
        if self.predictions is not None and self.predictions > self.n_new:
            raise ConfigError(f"predictions={self.predictions} is more than the {self.n_new} positions computed")
        return self

    @property
    def n_tokens(self) -> int:
        """Target positions computed in one step."""
        return self.batch * self.n_new

    @property
    def n_new(self) -> int:
        """Target positions a row computed in one step."""
        return 1 if self.mode is Mode.DECODE else self.length

    @property
    def n_predicted(self) -> int:
        """Rows of logits in one step."""
        return self.n_tokens if self.predictions is None else self.batch * self.predictions

    @property
    def last_length(self) -> int:
        """Tokens a row that stand in the cache at the end: a generation's last token is not read again."""
        return self.length + (self.new or 1) - 1

    @property
    def on_gpu(self) -> bool:
        return self.backend is Backend.CUDA

    @property
    def n_source(self) -> int:
        return self.length if self.source_length is None else self.source_length

    def check(self, config: ModelConfig) -> None:
        """Refuse work that this model would refuse."""
        for name, size in config.model_dump().items():
            if isinstance(size, int) and size > HUGE:
                raise ConfigError(f"{name}={size} is more than {HUGE}, the largest size that is costed")
        reads_source = isinstance(config, Seq2SeqConfig | RNNConfig)
        if self.source_length is not None and not reads_source:
            raise ConfigError(f"source_length={self.source_length}, but {config.family} reads no source")
        if self.mode in (Mode.DECODE, Mode.PREFILL, Mode.GENERATE):
            if isinstance(config, BERTConfig):
                raise ConfigError(f"mode={self.mode.value}: bert reads whole sequences and has no cache")
            if isinstance(config, GPTConfig) and not config.causal:
                raise ConfigError(f"mode={self.mode.value} needs a cache; with causal=False there is no past to keep")
        length = "length" if self.new is None else f"length={self.length} + new={self.new} - 1"
        for name, n in ((length, self.last_length), ("source_length", self.n_source if reads_source else 1)):
            if n > config.context_length:
                raise ContextLengthError(f"{name}={n} is more than the model's context_length={config.context_length}")
