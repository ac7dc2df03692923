"""Every closed choice, by name: the words that configs, parts, flags and files share."""

from enum import StrEnum


class HeadLayout(StrEnum):
    """How the heads' results become one vector."""

    SPLIT = "split"
    """Concatenate n_heads results of width d_value, then project."""
    POOLED = "pooled"
    """Values at full width d_model; the heads' results are added."""
    POOLED_MEAN = "pooled-mean"
    """As pooled, but averaged."""


class NormKind(StrEnum):
    LAYER = "layer"
    RMS = "rms"


class NormPosition(StrEnum):
    PRE = "pre"
    """Each sub-layer reads a normed copy (GPT-2 and later)."""
    POST = "post"
    """The sum is normed (the 2017 Transformer, BERT, lecture E)."""


class Activation(StrEnum):
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu-tanh"
    SILU = "silu"


class PositionKind(StrEnum):
    """How a model learns where its tokens stand."""

    NONE = "none"
    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"
    CONCATENATED = "concatenated"
    ROTARY = "rotary"
    ALIBI = "alibi"
    RELATIVE = "relative"


class SinusoidStyle(StrEnum):
    """Which frequency stands in which column."""

    INTERLEAVED = "interleaved"
    """sin, cos, sin, cos …; the pair i = 0, 1, … has frequency 10000^(−2i/d) (lecture B, the 2017 paper)."""
    INTERLEAVED_FROM_ONE = "interleaved-from-one"
    """The same with i = 1, 2, … d/2 (lecture E)."""
    HALVES = "halves"
    """All sines, then all cosines (Marian)."""


class ScoreKind(StrEnum):
    """How an RNN decoder's state is compared with the encoder's states."""

    NONE = "none"
    """No attention: the decoder sees the encoder's last state alone."""
    DOT = "dot"
    GENERAL = "general"
    ADDITIVE = "additive"


class CellKind(StrEnum):
    GRU = "gru"
    LSTM = "lstm"


class Kernel(StrEnum):
    """Which road computes attention."""

    PLAIN = "plain"
    """Explicit scores and softmax: the specification."""
    FUSED = "fused"
    """torch's fused scaled-dot-product attention."""
