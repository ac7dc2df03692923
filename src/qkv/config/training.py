"""Config for training: batch sizes, optimizer, schedule, precision, evaluation and checkpoints."""

from typing import Self

from pydantic import Field, model_validator

from qkv.choices import OptimizerKind, Precision, ScheduleKind
from qkv.config.base import Config, Count, Fraction
from qkv.errors import ConfigError


class TrainingConfig(Config):
    """Settings for training. A step's batch, dropout and learning rate depend only on these settings and the step."""

    steps: Count
    """Number of optimizer updates."""
    replans: tuple[tuple[Count, Count], ...] = ()
    """History of changes to the number of steps, as pairs (step, planned_steps).

    Each pair means that until `step`, the run was planned to end at `planned_steps`. `--minutes` records these pairs
    because it may change the number of steps during the run. The schedule continues from its current value.
    """
    batch_size: Count
    """Number of sequences per optimizer update."""
    micro_batch_size: Count = Field(default_factory=lambda fields: fields["batch_size"])
    """Number of sequences per forward and backward pass (default: batch_size).

    Gradients are accumulated over all passes of an update.
    """
    seq_len: Count
    """Number of tokens per sequence."""
    cross_documents: bool = True
    """Let tokens attend to other documents, as in nanoGPT. If False, tokens attend only to their own document."""
    seed: int = Field(default=0, ge=0)
    """Random seed for initialization, batches and dropout."""

    optimizer: OptimizerKind = OptimizerKind.ADAMW
    """Optimizer: AdamW or Muon."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    schedule: ScheduleKind = ScheduleKind.COSINE
    """Learning-rate schedule after the warmup."""
    warmup_steps: int = Field(default=100, ge=0)
    """Number of linear warmup steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps during which a WSD schedule decays the learning rate."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay, applied only to matrices."""
    beta1: Fraction = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Fraction = 0.95
    """Decay rate of Adam's second moment."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum gradient norm, or None to disable clipping. Larger gradients are clipped."""
    ema_decay: Fraction | None = None
    """Decay per step for an exponential moving average (EMA) of the weights, or None to disable it.

    If a decay is set, the EMA weights are evaluated and saved.
    """
    lora_rank: Count | None = None
    """Rank of the LoRA adapters for the attention projections, or None to train the weights directly.

    With LoRA, only the adapters are trained.
    """
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Ratio of each layer's learning rate to that of the layer above it, or None for equal learning rates."""

    label_smoothing: Fraction = 0.0
    """Label smoothing for the training loss (translation only). The validation loss uses no label smoothing."""

    precision: Precision = Precision.AUTO
    """Numeric precision used in the forward and backward pass."""
    compile: bool = False
    """Compile the training step with torch.compile."""
    loss_chunk_size: Count | None = None
    """Number of positions whose logits are computed at once, or None for all positions. Small chunks save memory."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass instead of storing them."""

    eval_every: Count = 250
    """Number of steps between evaluations."""
    eval_batches: Count | None = None
    """Number of validation batches per evaluation, or None to use all of them."""
    save_every: Count = Field(default_factory=lambda fields: fields["eval_every"])
    """Number of steps between checkpoints (default: eval_every)."""
    keep_checkpoints: Count = 2
    """Number of recent checkpoints to keep in addition to the best one."""
    patience: Count | None = None
    """Stop after this many evaluations without improvement, or never stop early if None."""
    best_metric: str | None = None
    """Metric for selecting the best evaluation (higher is better), or None to use the loss (lower is better)."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(
                f"batch_size must be a multiple of micro_batch_size, got batch_size={self.batch_size} "
                f"and micro_batch_size={self.micro_batch_size}"
            )
        if self.warmup_steps > self.steps and not self.replans:
            raise ConfigError(
                f"warmup_steps must not exceed steps, got warmup_steps={self.warmup_steps} and steps={self.steps}"
            )
        if any(step >= self.steps for step, _ in self.replans):
            raise ConfigError(
                f"all steps in replans must be less than steps={self.steps}, "
                f"got replans={[list(replan) for replan in self.replans]}; set training.replans=[] to discard them"
            )
        if self.ema_decay is not None and self.lora_rank is not None:
            raise ConfigError("ema_decay and lora_rank cannot be combined")
        if self.layer_decay is not None and self.optimizer is OptimizerKind.MUON:
            raise ConfigError("layer_decay requires optimizer='adamw', got optimizer='muon'")
        return self
