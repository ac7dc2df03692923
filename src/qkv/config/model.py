"""Model configs for the four families: GPT, BERT, encoder–decoder Transformer and RNN with attention.

They can be loaded from and saved to JSON and TOML files.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, model_validator

from qkv.choices import (
    Activation,
    CellKind,
    HeadCombination,
    NormKind,
    NormPosition,
    PoolerActivation,
    Pooling,
    PositionKind,
    ProblemType,
    RNNAttentionScore,
    SinusoidStyle,
)
from qkv.config.base import Config, Count, Fraction, did_you_mean_suffix
from qkv.errors import ConfigError


def _default_d_head(fields: dict[str, Any]) -> int:
    return max(1, fields["d_model"] // fields["n_heads"])


def _default_d_value(fields: dict[str, Any]) -> int:
    return fields["d_head"] if fields["head_combination"] is HeadCombination.SPLIT else fields["d_model"]


class RopeScaling(Config):
    """Scaling of the rotary frequencies to extend the context length of a trained model.

    If `original_context_length` is None, all frequencies are divided by `factor` (linear scaling). Otherwise, only low
    frequencies are scaled, as in Llama 3.1.
    """

    factor: float = Field(gt=0)
    """Number by which the rotary angles are divided."""
    original_context_length: Count | None = None
    """Context length with which the model was originally trained (Llama 3.1), or None for linear scaling."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Frequencies that complete fewer rotations than this over the original context are divided by the full factor."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Frequencies that complete more rotations than this are unchanged.

    Between the two limits, the scaling is interpolated.
    """

    @model_validator(mode="after")
    def _check_frequency_factors(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor must be less than high_freq_factor, got low_freq_factor={self.low_freq_factor} "
                f"and high_freq_factor={self.high_freq_factor}"
            )
        return self


class TransformerConfig(Config):
    """Fields shared by GPT, BERT and the encoder–decoder Transformer. The default values match GPT-2."""

    vocab_size: Count
    """Number of token ids."""
    context_length: Count
    """Maximum number of tokens in a sequence, which is also the size of the learned position table."""
    d_model: Count
    """Width of the residual stream."""
    n_heads: Count
    """Number of query heads."""

    head_combination: HeadCombination = HeadCombination.SPLIT
    """Method for combining the head outputs."""
    n_kv_heads: Count = Field(default_factory=lambda fields: fields["n_heads"])
    """Number of key/value heads (default: n_heads).

    If this number is smaller than n_heads, groups of query heads share a key/value head.
    """
    d_head: Count = Field(default_factory=_default_d_head)
    """Width of a query or key (default: d_model / n_heads)."""
    d_value: Count = Field(default_factory=_default_d_value)
    """Width of a value (default: d_head if the heads are split, d_model if they are pooled)."""
    output_projection: bool = True
    """Project the head outputs with W_O. If False, the combined width of the head outputs must be d_model."""
    attention_bias: bool = True
    """Add biases to the query, key, value and output projections."""
    scale_scores: bool = True
    """Divide attention scores by √d_head. T5 does not scale its scores."""
    sliding_window: Count | None = None
    """Attend only to keys that are fewer than this many positions away, or to all keys if None.

    If attention is not causal, the window covers both sides.
    """

    d_ff: Count = Field(default_factory=lambda fields: 4 * fields["d_model"])
    """Hidden width of the feed-forward layers (default: 4 · d_model)."""
    activation: Activation = Activation.GELU_TANH
    """Activation function for the feed-forward layers."""
    gated: bool = False
    """Use gated feed-forward layers, which compute activation(x · W_gate) ⊙ (x · W_up)."""
    feed_forward_bias: bool = True
    """Add biases to the feed-forward projections."""

    norm: NormKind = NormKind.LAYER
    """Kind of normalization layer."""
    norm_position: NormPosition = NormPosition.PRE
    """Whether norms precede or follow each sub-layer."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Small constant ε of the norms, which prevents a division by zero."""
    norm_bias: bool = True
    """Add a bias to each LayerNorm."""
    embedding_norm: bool = False
    """Normalize the sum of the embeddings."""
    final_norm: bool = True
    """Normalize the output of the last block."""

    positions: PositionKind = PositionKind.LEARNED
    """Kind of position encoding."""
    position_offset: int = Field(default=0, ge=0)
    """Number of unused rows before position 0 in a learned position table (2 in BART and RoBERTa)."""
    sinusoid: SinusoidStyle = SinusoidStyle.INTERLEAVED
    """Column order in sinusoidal position encodings."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for longer contexts, or None for no scaling."""
    relative_buckets: Count = 32
    """Number of buckets for relative position biases (T5)."""
    relative_max_distance: Count = 128
    """Distance from which all relative positions share the last bucket (T5)."""

    scale_embedding: bool = False
    """Multiply token embeddings by √d_model before adding position embeddings."""
    tie_embeddings: bool = True
    """Use the token embedding matrix as the unembedding matrix."""
    unembedding_bias: bool = False
    """Add a bias to the logits."""
    scale_logits: bool = False
    """Divide the final hidden states by √d_model before the unembedding.

    T5 does this if its embeddings are tied.
    """

    dropout: Fraction = 0.0
    """Dropout probability during training."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if "d_head" not in self.model_fields_set and self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model must be a multiple of n_heads, got d_model={self.d_model} and n_heads={self.n_heads}"
            )
        if self.n_kv_heads > self.n_heads:
            raise ConfigError(
                f"n_kv_heads must not exceed n_heads, got n_kv_heads={self.n_kv_heads} and n_heads={self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads must be a multiple of n_kv_heads, got n_heads={self.n_heads} and n_kv_heads={self.n_kv_heads}"
            )
        self._check_combined_head_width()
        if self.positions is PositionKind.ROTARY and self.d_head % 2:
            raise ConfigError(f"rotary positions require an even d_head, got d_head={self.d_head}")
        if self.rope_scaling is not None and self.positions is not PositionKind.ROTARY:
            raise ConfigError(f"rope_scaling requires positions='rotary', got positions={self.positions.value!r}")
        if self.positions in (PositionKind.SINUSOIDAL, PositionKind.CONCATENATED) and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions require an even d_model, got d_model={self.d_model}")
        if self.positions is PositionKind.RELATIVE and self.relative_buckets % 4:
            raise ConfigError(f"relative_buckets must be a multiple of 4, got {self.relative_buckets}")
        if self.positions is PositionKind.RELATIVE and self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                "relative_max_distance must be greater than relative_buckets/2, "
                f"got relative_max_distance={self.relative_max_distance} "
                f"and relative_buckets/2={self.relative_buckets // 2}"
            )
        return self

    def _check_combined_head_width(self) -> None:
        if self.head_combination is HeadCombination.SPLIT:
            if not self.output_projection and self.n_heads * self.d_value != self.d_model:
                raise ConfigError(
                    f"output_projection=False requires n_heads·d_value to equal d_model, "
                    f"got n_heads·d_value={self.n_heads * self.d_value} and d_model={self.d_model}"
                )
        elif self.d_value != self.d_model:
            raise ConfigError(
                f"pooled heads require d_value to equal d_model, got d_value={self.d_value} and d_model={self.d_model}"
            )


class GPTConfig(TransformerConfig):
    """Config for a decoder-only Transformer with causal attention."""

    family: Literal["gpt"] = "gpt"
    n_layers: Count
    """Number of Transformer blocks."""
    causal: bool = True
    """Mask future positions. If False, attention is bidirectional, as in BERT (lecture A)."""


class SentenceEmbedding(Config):
    """Sentence-embedding settings, stored in the format of sentence-transformers."""

    pooling: Pooling = Pooling.MEAN
    """Method for combining the token states into one vector."""
    normalize: bool = False
    """Scale each vector to unit length."""
    max_tokens: Count | None = None
    """Maximum number of tokens per text, including [CLS] and [SEP], or None for the context length."""


def _default_n_classes(fields: dict[str, Any]) -> int | None:
    return None if fields["class_names"] is None else len(fields["class_names"])


def _default_problem(fields: dict[str, Any]) -> ProblemType:
    return ProblemType.REGRESSION if fields["n_classes"] == 1 else ProblemType.SINGLE_LABEL


class BERTConfig(TransformerConfig):
    """Config for an encoder-only Transformer with optional pre-training and classification heads."""

    family: Literal["bert"] = "bert"
    n_layers: Count
    """Number of Transformer blocks."""
    n_segments: int = Field(default=2, ge=0)
    """Number of segment embeddings, or 0 to disable them (DistilBERT)."""
    activation: Activation = Activation.GELU
    norm_position: NormPosition = NormPosition.POST
    norm_eps: float = Field(default=1e-12, gt=0)
    embedding_norm: bool = True
    final_norm: bool = False
    unembedding_bias: bool = True
    pooler: bool = True
    """Add a pooler, which computes activation(W · [CLS]) for the next-sentence and classification heads."""
    pooler_activation: PoolerActivation = PoolerActivation.TANH
    """Activation function for the pooler."""
    masked_lm_head: bool = False
    """Add a masked language modeling head."""
    next_sentence_head: bool = False
    """Add a next-sentence prediction head."""
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Class names, in the order of the classification head's outputs."""
    n_classes: Count | None = Field(default_factory=_default_n_classes)
    """Number of classification outputs (default: the number of class names), or None for no classification head."""
    problem_type: ProblemType = Field(default_factory=_default_problem)
    """Kind of classification problem (default: regression for one output, single-label for several outputs)."""
    sentence_embedding: SentenceEmbedding | None = None
    """Sentence-embedding settings, or None if the model was not trained for sentence embeddings."""

    @property
    def has_multiple_segments(self) -> bool:
        """Whether segment ids distinguish the two texts of a pair.

        DistilBERT has no segment embeddings, and RoBERTa uses a single segment embedding for all tokens.
        """
        return self.n_segments > 1

    @model_validator(mode="after")
    def _check_pooler(self) -> Self:
        if not self.pooler and (self.next_sentence_head or self.n_classes is not None):
            raise ConfigError("next_sentence_head and n_classes require the pooler, got pooler=False")
        return self

    @model_validator(mode="after")
    def _check_classes_and_problem_type(self) -> Self:
        names, n, problem_type = self.class_names, self.n_classes, self.problem_type.value
        if names is not None and n != len(names):
            raise ConfigError(f"n_classes={n}, but class_names has {len(names)} names")
        if names is not None and len(set(names)) < len(names):
            duplicate = next(name for i, name in enumerate(names) if name in names[:i])
            raise ConfigError(f"class_names contains {duplicate!r} more than once")
        if n is None and self.problem_type is not ProblemType.SINGLE_LABEL:
            raise ConfigError(
                f"problem_type={problem_type!r} requires a classification head (n_classes or class_names)"
            )
        if self.problem_type is ProblemType.REGRESSION and n != 1:
            raise ConfigError(f"problem_type='regression' requires n_classes=1, got n_classes={n}")
        if self.problem_type is ProblemType.SINGLE_LABEL and n == 1:
            raise ConfigError("problem_type='single-label' requires at least 2 classes, got n_classes=1")
        return self


class Seq2SeqConfig(TransformerConfig):
    """Config for an encoder–decoder Transformer. The default values match arXiv:1706.03762."""

    family: Literal["seq2seq"] = "seq2seq"
    n_encoder_layers: Count
    """Number of encoder blocks."""
    n_decoder_layers: Count
    """Number of decoder blocks."""
    activation: Activation = Activation.RELU
    norm_position: NormPosition = NormPosition.POST
    final_norm: bool = False
    positions: PositionKind = PositionKind.SINUSOIDAL
    scale_embedding: bool = True
    source_vocab_size: Count = Field(default_factory=lambda fields: fields["vocab_size"])
    """Number of source token ids (default: vocab_size)."""
    share_embeddings: bool = True
    """Share one token embedding between source and target, which must then use the same vocabulary."""
    d_patch: Count | None = None
    """Number of values per image patch, or None if the source consists of token ids instead of an image."""

    @model_validator(mode="after")
    def _check_image_source(self) -> Self:
        has_words = self.share_embeddings or self.source_vocab_size != self.vocab_size
        if self.d_patch is not None and has_words:
            raise ConfigError(
                f"d_patch={self.d_patch}: image sources have no vocabulary; "
                "set share_embeddings=False and omit source_vocab_size"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_embeddings(self) -> Self:
        if self.share_embeddings and self.source_vocab_size != self.vocab_size:
            raise ConfigError(
                "share_embeddings requires source and target vocabularies of the same size, "
                f"got source_vocab_size={self.source_vocab_size} "
                f"and vocab_size={self.vocab_size}"
            )
        return self


class RNNConfig(Config):
    """Config for an RNN with a bidirectional encoder and a decoder that attends to the encoder states."""

    family: Literal["rnn"] = "rnn"
    vocab_size: Count
    """Number of target token ids."""
    source_vocab_size: Count = Field(default_factory=lambda fields: fields["vocab_size"])
    """Number of source token ids (default: vocab_size)."""
    d_model: Count
    """Width of the embeddings, the decoder state and the concatenated states of the two encoder directions."""
    n_encoder_layers: Count = 1
    """Number of recurrent encoder layers."""
    n_decoder_layers: Count = 1
    """Number of recurrent decoder layers."""
    cell: CellKind = CellKind.GRU
    """Kind of recurrent cell: GRU or LSTM."""
    attention: RNNAttentionScore = RNNAttentionScore.GENERAL
    """Attention score function, or `none` for a decoder without attention."""
    context_length: Count = 1024
    """Maximum sequence length. The recurrence itself does not limit the length."""
    tie_embeddings: bool = False
    """Use the target embedding matrix as the unembedding matrix."""
    dropout: Fraction = 0.0
    """Dropout probability during training."""
    init_std: float = Field(default=0.08, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check_even_width(self) -> Self:
        if self.d_model % 2:
            raise ConfigError(
                f"d_model must be even to be split between the two directions, got d_model={self.d_model}"
            )
        return self


ModelConfig = GPTConfig | BERTConfig | Seq2SeqConfig | RNNConfig

FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt": GPTConfig,
    "bert": BERTConfig,
    "seq2seq": Seq2SeqConfig,
    "rnn": RNNConfig,
}


def config_from_dict(settings: dict[str, Any]) -> ModelConfig:
    """Create a model config from a dictionary. The key `family` selects the config class."""
    family = settings.get("family")
    if family is None:
        raise ConfigError(f"family is missing; available families: {', '.join(FAMILIES)}")
    if not isinstance(family, str) or family not in FAMILIES:
        hint = did_you_mean_suffix(str(family), list(FAMILIES))
        raise ConfigError(f"unknown family {family!r}{hint}; available families: {', '.join(FAMILIES)}")
    return FAMILIES[family](**settings)


def load_config(path: str | Path) -> ModelConfig:
    """Load a model config from a .json or .toml file. The key `family` selects the config class."""
    path = Path(path)
    try:
        settings = _parse_config_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a table of settings, got {type(settings).__name__}")
    try:
        return config_from_dict(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_config(config: ModelConfig, path: str | Path) -> None:
    """Write all fields of a config, including derived defaults, to a .json or .toml file."""
    path = Path(path)
    settings = config.model_dump(mode="json", exclude_none=True)
    match path.suffix:
        case ".json":
            text = json.dumps(settings, indent=2) + "\n"
        case ".toml":
            text = tomli_w.dumps(settings)
        case _:
            raise ConfigError(_unknown_suffix_message(path))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _parse_config_file(path: Path) -> Any:  # noqa: ANN401 - any JSON or TOML value, checked by the caller
    match path.suffix:
        case ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        case ".toml":
            return tomllib.loads(path.read_text(encoding="utf-8"))
        case _:
            raise ConfigError(_unknown_suffix_message(path))


def _unknown_suffix_message(path: Path) -> str:
    return f"{path}: config files must end in .json or .toml, got '{path.suffix}'"
