"""Recipes for training and fine-tuning, which contain model, tokenizer, data and training settings in one TOML file."""

import tomllib
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import tomli_w
from pydantic import Field, model_validator

from qkv.choices import OptimizerKind, Precision, ProblemType, ScheduleKind, TokenizerKind
from qkv.config.base import Config, Count, Fraction
from qkv.config.model import ModelConfig, config_from_dict
from qkv.errors import ConfigError

C = TypeVar("C", bound=Config)


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


class MaskingConfig(Config):
    """Settings for masked language modeling and next-sentence prediction. The defaults match arXiv:1810.04805."""

    next_sentence: bool = True
    """Use pairs of segments. If False, use single segments.

    In half of the pairs, the two segments come from different documents.
    """
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of tokens to predict."""
    mask_token_fraction: float = Field(default=0.8, ge=0, le=1)
    """Fraction of the predicted tokens that are replaced with [MASK]."""
    random_token_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the predicted tokens that are replaced with a random token.

    The remaining predicted tokens are unchanged.
    """
    whole_word_masking: bool = False
    """Mask all tokens of a word together."""
    short_sequence_fraction: Fraction = 0.1
    """Fraction of examples to shorten so that the model also sees texts below the maximum length."""

    @model_validator(mode="after")
    def _check_fractions(self) -> Self:
        if self.mask_token_fraction + self.random_token_fraction > 1:
            raise ConfigError(
                f"the sum of mask_token_fraction and random_token_fraction must not exceed 1, got "
                f"mask_token_fraction={self.mask_token_fraction} and "
                f"random_token_fraction={self.random_token_fraction}"
            )
        return self

    @property
    def n_special_tokens(self) -> int:
        """Number of special tokens per row: two in [CLS] A [SEP], or three in [CLS] A [SEP] B [SEP]."""
        return 3 if self.next_sentence else 2

    def max_masked_tokens(self, seq_len: int) -> int:
        """Return the maximum number of tokens to predict in a row of `seq_len` tokens."""
        return max(1, ceil(self.masked_fraction * (seq_len - self.n_special_tokens)))


class PairsConfig(Config):
    """Settings for translation data.

    By default, each line of a file contains a source sentence and a target sentence, separated by a tab. If
    `target_suffix` is set, the source and target sentences are in two line-aligned files.
    """

    target_suffix: str | None = Field(default=None, pattern=r"^\.\w+$")
    """Suffix of the target files. For example, `.en` means that the targets for corpus.es.xz are in corpus.en.xz."""
    max_length_ratio: float = Field(default=3.0, gt=1)
    """Maximum ratio between the lengths of the two sides of a pair. Pairs with a higher ratio are dropped.

    Lengths below 12 characters count as 12.
    """
    repeat: dict[str, Count] = Field(default_factory=dict)
    """Number of times that each pair in a file is used per epoch (default: 1), keyed by file name in data.train."""
    join_fraction: Fraction = 0.1
    """Fraction of batches in which each row contains two or three concatenated pairs.

    These batches teach the model to translate long inputs and several sentences at once.
    """
    source_vocab_size: Count | None = None
    """Size of a separate source vocabulary, or None to use a single vocabulary for both languages."""
    n_eval_translations: int = Field(default=200, ge=0)
    """Number of validation pairs to translate and score (BLEU, chrF) at each evaluation."""


class TokenizerConfig(Config):
    """Settings for the tokenizer, which is either trained on the training text or loaded from `path`."""

    kind: TokenizerKind = TokenizerKind.BPE
    """Tokenization algorithm."""
    vocab_size: Count = 4096
    """Maximum number of token ids, including special tokens."""
    lowercase: bool = False
    """Convert text to lowercase and, for WordPiece, remove accents (as in `uncased` models)."""
    path: str | None = None
    """Path of an existing tokenizer to use instead of training one."""


class DataConfig(Config):
    """Data files for training and validation. Paths are relative to the data folder and may contain `*`."""

    train: tuple[str, ...] = Field(min_length=1)
    """Training files."""
    validation: tuple[str, ...] = ()
    """Validation files."""
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the training text to hold out for validation if there are no validation files.

    The held-out part is taken from the end of the text.
    """

    @model_validator(mode="after")
    def _check_validation_source(self) -> Self:
        if self.validation and self.validation_fraction is not None:
            raise ConfigError("data: validation and validation_fraction cannot be combined")
        return self


class Recipe(Config):
    """All settings needed to reproduce a training run. The tokenizer determines the model's vocabulary size."""

    family: Literal["gpt", "bert", "seq2seq", "rnn"]
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: dict[str, Any]
    data: DataConfig
    pairs: PairsConfig | None = Field(default_factory=lambda fields: _default_pairs(fields.get("family", "")))
    """Settings for translation data (seq2seq and rnn only)."""
    masking: MaskingConfig | None = Field(default_factory=lambda fields: _default_masking(fields.get("family", "")))
    """Settings for masking (bert only)."""
    training: TrainingConfig
    init_from: str | None = None
    """Model whose weights are used to initialize the run."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.pairs is not None and _default_pairs(self.family) is None:
            raise ConfigError(f"pairs is only valid for family='seq2seq' or 'rnn', got family={self.family!r}")
        if self.masking is not None and _default_masking(self.family) is None:
            raise ConfigError(f"masking is only valid for family='bert', got family={self.family!r}")
        if self.training.label_smoothing and self.pairs is None:
            raise ConfigError(
                f"training.label_smoothing={self.training.label_smoothing} is only valid for family='seq2seq' "
                f"or 'rnn', got family={self.family!r}"
            )
        if not self.training.cross_documents and self.family != "gpt":
            raise ConfigError(
                f"training.cross_documents=false is only valid for family='gpt', got family={self.family!r}"
            )
        config = self.build_model_config(self.tokenizer.vocab_size)
        if self.training.seq_len > config.context_length:
            raise ConfigError(
                f"training.seq_len must not exceed model.context_length, got training.seq_len={self.training.seq_len} "
                f"and model.context_length={config.context_length}"
            )
        return self

    def build_model_config(self, vocab_size: int) -> ModelConfig:
        """Create the model config for a vocabulary of `vocab_size` tokens."""
        if "vocab_size" in self.model:
            raise ConfigError(
                "model.vocab_size cannot be set because the tokenizer determines it; set tokenizer.vocab_size instead"
            )
        settings = {**self.model, "family": self.family, "vocab_size": vocab_size}
        if self.pairs is not None and self.pairs.source_vocab_size is not None:
            settings["source_vocab_size"] = self.pairs.source_vocab_size
        if self.masking is not None:
            heads = {"masked_lm_head": True, "next_sentence_head": self.masking.next_sentence}
            settings = {**heads, **settings}
        return config_from_dict(settings)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def _default_pairs(family: str) -> PairsConfig | None:
    return PairsConfig() if family in ("seq2seq", "rnn") else None


def _default_masking(family: str) -> MaskingConfig | None:
    return MaskingConfig() if family == "bert" else None


def load_recipe(path: str | Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Load a recipe file and apply overrides such as `training.steps=200`."""
    return load_toml_settings(Recipe, Path(path), overrides)


def load_toml_settings(kind: type[C], path: Path, overrides: tuple[str, ...] = ()) -> C:
    """Load a config of type `kind` from a TOML file and apply overrides such as `training.steps=200`."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid TOML: {error}") from None
    for override in overrides:
        _apply_override(settings, override)
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"invalid override '{override}': expected NAME=VALUE, for example training.steps=200")
    *tables, key = name.strip().split(".")
    target = settings
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigError(f"invalid override '{override}': {table} is a single value, not a table of settings")
    try:
        target[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A value that is not valid TOML is treated as an unquoted string, as in schedule=linear.
        target[key] = text


class FinetuningSettings(Config):
    """Fine-tuning settings that do not depend on the model or the data files.

    If epochs, batch_size or learning_rate is None, a value is chosen based on the size of the data and the model.
    """

    text_columns: tuple[str, ...] = Field(default=(), max_length=2)
    """Name of the text column, or of the two columns of a text pair (default: `text`, or `text_a` and `text_b`)."""
    label_column: str | None = None
    """Name of the label column (default: `label`, or `score` for regression if that column exists)."""
    problem_type: ProblemType = ProblemType.SINGLE_LABEL
    """Kind of classification problem."""
    n_train_rows: Count | None = None
    """Number of rows in the stratified random training sample, or None to train on all rows.

    A separate sample is drawn for each seed.
    """
    truncate: bool = False
    """Truncate texts that exceed the context length. If False, an error is raised for such texts."""

    from_scratch: bool = False
    """Use only the model's architecture and start from random weights."""
    freeze: Literal["all"] | int = 0
    """Number of lowest layers to freeze along with the embeddings, or `all` to train only the head.

    If 0, nothing is frozen.
    """
    lora_rank: Count | None = None
    """Rank of the LoRA adapters, or None to train the weights directly."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Ratio of each layer's learning rate to that of the layer above it, or None for equal learning rates."""

    n_seeds: Count = 1
    """Number of runs, which use consecutive seeds.

    The runs differ in head initialization, row order and dropout.
    """
    seed: int = Field(default=0, ge=0)
    """First random seed."""
    epochs: Count | None = None
    """Number of passes over the training rows."""
    batch_size: Count | None = None
    """Number of rows per optimizer update."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate."""
    dropout: Fraction = 0.1
    """Dropout probability."""
    patience: Count | None = 5
    """Stop after this many evaluations without improvement. Each run has ten evaluations."""
    precision: Precision = Precision.AUTO
    """Numeric precision used for training."""
    compile: bool = False
    """Compile the training step with torch.compile."""

    @model_validator(mode="after")
    def _check_freezing_and_lora(self) -> Self:
        if isinstance(self.freeze, int) and self.freeze < 0:
            raise ConfigError(f"freeze must be 'all' or a non-negative number of layers, got {self.freeze}")
        if self.freeze and self.lora_rank is not None:
            raise ConfigError("freeze cannot be combined with lora_rank, which already freezes the original weights")
        if self.from_scratch and (self.freeze or self.lora_rank is not None):
            raise ConfigError(
                "from_scratch cannot be combined with freeze or lora_rank because all random weights must be trained"
            )
        return self


class FinetuningConfig(FinetuningSettings):
    """Models, data files and settings for a fine-tuning experiment. Each model is fine-tuned with each seed."""

    models: tuple[str, ...] = Field(min_length=1)
    """Model names or folders."""
    train: str
    """File with labeled training rows."""
    evaluation: str | None = None
    """File with labeled evaluation rows, or None to hold out a tenth of the training rows."""

    @model_validator(mode="after")
    def _check_models_differ(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ConfigError(f"models must not contain duplicates, got {list(self.models)}")
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_finetuning(path: Path, overrides: tuple[str, ...] = ()) -> FinetuningConfig:
    """Load a fine-tuning config from a TOML file and apply overrides such as `epochs=2`."""
    return load_toml_settings(FinetuningConfig, path, overrides)
