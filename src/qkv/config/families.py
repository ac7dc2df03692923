"""What describes a GPT, a BERT, an encoder–decoder and an RNN with attention."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qkv.choices import (
    Activation,
    CellKind,
    HeadLayout,
    NormKind,
    NormPosition,
    PoolerActivation,
    Pooling,
    PositionKind,
    ProblemType,
    ScoreKind,
    SinusoidStyle,
)
from qkv.config.base import Config, Count, Fraction
from qkv.errors import ConfigError


def _default_d_head(fields: dict[str, Any]) -> int:
    return max(1, fields["d_model"] // fields["n_heads"])


def _default_d_value(fields: dict[str, Any]) -> int:
    return fields["d_head"] if fields["head_layout"] is HeadLayout.SPLIT else fields["d_model"]


class RopeScaling(Config):
    """Rotary angles slowed down, so that a longer text keeps to angles that a shorter one has taught."""

    factor: float = Field(gt=0)
    """Angles are divided by it."""
    original_context_length: Count | None = None
    """None: all angles alike (linear). Else Llama 3.1's rule: only turns that are slow, compared with this length."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Fewer turns than this in the original context: slowed down in full."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """More turns than this: kept; a smooth change between the two."""

    @model_validator(mode="after")
    def _check_frequency_factors(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} must be less than high_freq_factor={self.high_freq_factor}"
            )
        return self


class TransformerConfig(Config):
    """What GPT, BERT and the encoder–decoder have in common; the defaults are GPT-2's."""

    vocab_size: Count
    context_length: Count
    """Most tokens a sequence may have; a table's size where positions are learned."""
    d_model: Count
    n_heads: Count

    head_layout: HeadLayout = HeadLayout.SPLIT
    n_kv_heads: Count = Field(default_factory=lambda fields: fields["n_heads"])
    """Fewer than n_heads: each key/value head serves a group of query heads."""
    d_head: Count = Field(default_factory=_default_d_head)
    """Width of one query or key; d_model / n_heads unless said."""
    d_value: Count = Field(default_factory=_default_d_value)
    """Width of one head's value; d_head when split, d_model when pooled."""
    output_projection: bool = True
    """Project the heads' result (W_O); without it that result must itself be d_model wide."""
    attention_bias: bool = True
    scale_scores: bool = True
    """Divide scores by √d_head; T5 alone does not."""
    sliding_window: Count | None = None
    """See only what stands less than this many positions away, on both sides where one may look ahead; None: all."""

    d_ff: Count = Field(default_factory=lambda fields: 4 * fields["d_model"])
    activation: Activation = Activation.GELU_TANH
    gated: bool = False
    """Feed-forward with a gate: activation(xW_gate) ⊙ xW_in."""
    feed_forward_bias: bool = True

    norm: NormKind = NormKind.LAYER
    norm_position: NormPosition = NormPosition.PRE
    norm_eps: float = Field(default=1e-5, gt=0)
    norm_bias: bool = True
    embedding_norm: bool = False
    final_norm: bool = True

    positions: PositionKind = PositionKind.LEARNED
    position_offset: int = Field(default=0, ge=0)
    """Rows of a learned table that stand before position 0 (2 in BART and RoBERTa)."""
    sinusoid: SinusoidStyle = SinusoidStyle.INTERLEAVED
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    relative_buckets: Count = 32
    relative_max_distance: Count = 128

    scale_embedding: bool = False
    """Multiply token vectors by √d_model before positions are added."""
    tie_embeddings: bool = True
    unembedding_bias: bool = False
    scale_logits: bool = False
    """Multiply the last states by 1/√d_model before the unembedding, tied or not; T5 does where it is tied."""

    dropout: Fraction = 0.0
    init_std: float = Field(default=0.02, gt=0)
    """Spread of the random weights a new model starts from."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if "d_head" not in self.model_fields_set and self.d_model % self.n_heads:
            raise ConfigError(f"d_model={self.d_model} must be a multiple of n_heads={self.n_heads}")
        if self.n_kv_heads > self.n_heads:
            raise ConfigError(f"n_kv_heads={self.n_kv_heads} must not be more than n_heads={self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        self._check_head_layout()
        if self.positions is PositionKind.ROTARY and self.d_head % 2:
            raise ConfigError(f"rotary positions turn pairs: d_head={self.d_head} must be even")
        if self.rope_scaling is not None and self.positions is not PositionKind.ROTARY:
            raise ConfigError(f"rope_scaling is set, but positions={self.positions.value!r} are not rotary")
        if self.positions in (PositionKind.SINUSOIDAL, PositionKind.CONCATENATED) and self.d_model % 2:
            raise ConfigError(f"sinusoidal positions come in pairs: d_model={self.d_model} must be even")
        if self.positions is PositionKind.RELATIVE and self.relative_buckets % 4:
            raise ConfigError(f"relative_buckets={self.relative_buckets} must be a multiple of 4")
        if self.positions is PositionKind.RELATIVE and self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_max_distance={self.relative_max_distance} must be more than "
                f"relative_buckets/2={self.relative_buckets // 2}"
            )
        return self

    def _check_head_layout(self) -> None:
        if self.head_layout is HeadLayout.SPLIT:
            if not self.output_projection and self.n_heads * self.d_value != self.d_model:
                raise ConfigError(
                    f"without output_projection n_heads·d_value={self.n_heads * self.d_value} "
                    f"must be d_model={self.d_model}"
                )
        elif self.d_value != self.d_model:
            raise ConfigError(f"pooled heads add up: d_value={self.d_value} must be d_model={self.d_model}")


class GPTConfig(TransformerConfig):
    """A decoder-only Transformer: every position sees itself and the past."""

    family: Literal["gpt"] = "gpt"
    n_layers: Count
    causal: bool = True
    """Off, the same block is BERT's: it sees everything (lecture A's one switch)."""


class SentenceEmbedding(Config):
    """How a model that was trained for sentence vectors makes them, as sentence-transformers keeps it."""

    pooling: Pooling = Pooling.MEAN
    normalize: bool = False
    """Divide each vector by its length."""
    max_tokens: Count | None = None
    """Longest text it was trained on, [CLS] and [SEP] counted; None: the context length."""


def _default_n_classes(fields: dict[str, Any]) -> int | None:
    return None if fields["class_names"] is None else len(fields["class_names"])


def _default_problem(fields: dict[str, Any]) -> ProblemType:
    return ProblemType.REGRESSION if fields["n_classes"] == 1 else ProblemType.SINGLE_LABEL


class BERTConfig(TransformerConfig):
    """An encoder-only Transformer with the heads of its two pre-training games and its fine-tuning."""

    family: Literal["bert"] = "bert"
    n_layers: Count
    n_segments: int = Field(default=2, ge=0)
    """0: a model without segments (DistilBERT)."""
    activation: Activation = Activation.GELU
    norm_position: NormPosition = NormPosition.POST
    norm_eps: float = Field(default=1e-12, gt=0)
    embedding_norm: bool = True
    final_norm: bool = False
    unembedding_bias: bool = True
    pooler: bool = True
    """tanh(W·[CLS]): what next-sentence and classification heads read."""
    pooler_activation: PoolerActivation = PoolerActivation.TANH
    masked_lm_head: bool = False
    next_sentence_head: bool = False
    class_names: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """What each output of the classification head means, in order."""
    n_classes: Count | None = Field(default_factory=_default_n_classes)
    """Outputs of the classification head; None: there is no such head."""
    problem_type: ProblemType = Field(default_factory=_default_problem)
    """What the classification head answers; one output is a number unless said."""
    sentence_embedding: SentenceEmbedding | None = None

    @property
    def uses_segment_ids(self) -> bool:
        """Whether segments tell a pair's texts apart: DistilBERT has none of them, RoBERTa one for all."""
        return self.n_segments > 1

    @model_validator(mode="after")
    def _check_pooler(self) -> Self:
        if not self.pooler and (self.next_sentence_head or self.n_classes is not None):
            raise ConfigError("pooler=False, but next_sentence_head and n_classes read the pooler")
        return self

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        names, n, problem_type = self.class_names, self.n_classes, self.problem_type.value
        if names is not None and n != len(names):
            raise ConfigError(f"n_classes={n}, but class_names has {len(names)} names")
        if names is not None and len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ConfigError(f"class_names has {twice!r} twice")
        if n is None and self.problem_type is not ProblemType.SINGLE_LABEL:
            raise ConfigError(f"problem={problem_type!r}, but there is no classification head (n_classes, class_names)")
        if self.problem_type is ProblemType.REGRESSION and n != 1:
            raise ConfigError(f"problem_type='regression' has one output, not n_classes={n}")
        if self.problem_type is ProblemType.SINGLE_LABEL and n == 1:
            raise ConfigError("problem_type='single-label' needs at least 2 classes, not n_classes=1")
        return self


class Seq2SeqConfig(TransformerConfig):
    """An encoder–decoder Transformer; the defaults are the 2017 paper's."""

    family: Literal["seq2seq"] = "seq2seq"
    n_encoder_layers: Count
    n_decoder_layers: Count
    activation: Activation = Activation.RELU
    norm_position: NormPosition = NormPosition.POST
    final_norm: bool = False
    positions: PositionKind = PositionKind.SINUSOIDAL
    scale_embedding: bool = True
    source_vocab_size: Count = Field(default_factory=lambda fields: fields["vocab_size"])
    share_embeddings: bool = True
    """One token table for source and target; only where both have one vocabulary."""
    d_patch: Count | None = None
    """The source is a picture, cut into patches of so many numbers; None: it is ids."""

    @model_validator(mode="after")
    def _check_image_source(self) -> Self:
        has_words = self.share_embeddings or self.source_vocab_size != self.vocab_size
        if self.d_patch is not None and has_words:
            raise ConfigError(
                f"d_patch={self.d_patch}: the source is a picture, which has no words; "
                "set share_embeddings=False and leave source_vocab_size out"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_embeddings(self) -> Self:
        if self.share_embeddings and self.source_vocab_size != self.vocab_size:
            raise ConfigError(
                f"share_embeddings needs one vocabulary: source_vocab_size={self.source_vocab_size}, "
                f"vocab_size={self.vocab_size}"
            )
        return self


class RNNConfig(Config):
    """A bidirectional recurrent encoder and a recurrent decoder that attends to its states."""

    family: Literal["rnn"] = "rnn"
    vocab_size: Count
    source_vocab_size: Count = Field(default_factory=lambda fields: fields["vocab_size"])
    d_model: Count
    """Width of embeddings, of the decoder's state, and of the encoder's two directions together."""
    n_encoder_layers: Count = 1
    n_decoder_layers: Count = 1
    cell: CellKind = CellKind.GRU
    attention: ScoreKind = ScoreKind.GENERAL
    context_length: Count = 1024
    """Longest sequence taken; the recurrence itself has no such bound."""
    tie_embeddings: bool = False
    dropout: Fraction = 0.0
    init_std: float = Field(default=0.08, gt=0)

    @model_validator(mode="after")
    def _check_even_width(self) -> Self:
        if self.d_model % 2:
            raise ConfigError(f"two directions share d_model={self.d_model}, which must be even")
        return self
