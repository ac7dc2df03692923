"""How a model is trained: everything that, with the data, decides every number of a run."""

from typing import Self

from pydantic import Field, model_validator

from qkv.choices import OptimizerKind, Precision, ScheduleKind
from qkv.config.base import Config, Count, Fraction
from qkv.errors import ConfigError


class TrainingConfig(Config):
    """Batch t, its dropout and its learning rate are pure functions of these settings and t."""

    steps: Count
    replans: tuple[tuple[Count, Count], ...] = ()
    """(at, steps) …: until step `at` the run was meant to end at `steps`. Written by `--minutes`, whose clock may move
    the last step; the schedule goes on from where it stood."""
    batch_size: Count
    """Sequences an update sees."""
    micro_batch_size: Count = Field(default_factory=lambda fields: fields["batch_size"])
    """Sequences in memory at once; gradients add up to the same update."""
    seq_len: Count
    """Tokens of a sequence."""
    cross_documents: bool = True
    """Windows run across documents, as nanoGPT's do; off, no position sees another document."""
    seed: int = Field(default=0, ge=0)

    optimizer: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: float = Field(default=1e-3, gt=0)
    min_lr_ratio: Fraction = 0.1
    """What is left of the learning rate at the end, as a share of it."""
    schedule: ScheduleKind = ScheduleKind.COSINE
    warmup_steps: int = Field(default=100, ge=0)
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps in which a WSD schedule goes down."""
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices alone."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm an update may have; None: any."""
    ema_decay: Fraction | None = None
    """Evaluate and keep a running average of the weights, with this decay a step."""
    lora_rank: Count | None = None
    """Train a product of two thin matrices beside each attention matrix, and nothing else."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Each layer learns this much slower than the one above it, the embeddings slowest; None: all alike."""

    label_smoothing: Fraction = 0.0
    """Share of the aim that is spread evenly over all words, in training alone: validation is scored without.
    For translation."""

    precision: Precision = Precision.AUTO
    compile: bool = False
    loss_chunk_size: Count | None = None
    """Positions whose logits are held at once; None: all of them."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its insides."""

    eval_every: Count = 250
    eval_batches: Count | None = None
    """Validation batches an evaluation takes; None: all there are."""
    save_every: Count = Field(default_factory=lambda fields: fields["eval_every"])
    keep_checkpoints: Count = 2
    """How many of the last checkpoints stay, besides the best."""
    patience: Count | None = None
    """Stop after this many evaluations without a better one."""
    best_metric: str | None = None
    """The measure by which an evaluation is the best, more being better; None: the loss, less being better."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of micro_batch_size={self.micro_batch_size}"
            )
        if self.warmup_steps > self.steps and not self.replans:
            raise ConfigError(f"warmup_steps={self.warmup_steps} must not be more than steps={self.steps}")
        if any(at >= self.steps for at, _ in self.replans):
            raise ConfigError(
                f"replans={[list(one) for one in self.replans]} has a step that is not before steps={self.steps}; "
                "for another plan say replans=[]"
            )
        if self.ema_decay is not None and self.lora_rank is not None:
            raise ConfigError("ema_decay and lora_rank cannot be used together")
        if self.layer_decay is not None and self.optimizer is OptimizerKind.MUON:
            raise ConfigError("layer_decay is for optimizer='adamw'; muon moves every layer equally far")
        return self
