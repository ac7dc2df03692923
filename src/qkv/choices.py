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


class AttentionKernel(StrEnum):
    """Which road computes attention."""

    EAGER = "eager"
    """Explicit scores and softmax: the specification."""
    FUSED = "fused"
    """torch's fused scaled-dot-product attention."""


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    MUON = "muon"
    """Muon for the blocks' matrices, AdamW for everything else."""


class ScheduleKind(StrEnum):
    """How the learning rate goes down after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"
    """Warm-up, stable, then a linear decay at the end (arXiv:2404.06395)."""
    NOAM = "noam"
    """As 1/√step after the warm-up, so that it need not know the last step (arXiv:1706.03762, eq. 3)."""


class Precision(StrEnum):
    AUTO = "auto"
    """bf16 on a GPU, fp32 on a CPU."""
    FP32 = "fp32"
    BF16 = "bf16"
    """Products in bfloat16, weights and their updates in float32."""


class TokenizerKind(StrEnum):
    """What a tokenizer's pieces are."""

    BPE = "bpe"
    """Byte-level byte-pair encoding (GPT-2): any text, nothing unknown."""
    WORDPIECE = "wordpiece"
    """Words and their continuations, marked ## (BERT)."""
    UNIGRAM = "unigram"
    """The likeliest cut under a unigram model (SentencePiece, T5)."""
    CHARACTER = "char"


class SpecialTokenStyle(StrEnum):
    """Which special tokens a trained tokenizer has, and what it puts around a text."""

    GPT = "gpt"
    """<|endoftext|> alone; nothing around a text."""
    BERT = "bert"
    """[PAD] [UNK] [CLS] [SEP] [MASK]; [CLS] A [SEP], or [CLS] A [SEP] B [SEP] with segments 0 and 1."""
    SEQ2SEQ = "seq2seq"
    """<pad> <bos> <eos> <unk>; <bos> A <eos>."""


class SpecialToken(StrEnum):
    """What a special token is for; the value is Hugging Face's word in `tokenizer_config.json`."""

    BOS = "bos_token"
    EOS = "eos_token"
    """Ends a text; GPT's <|endoftext|> is both BEGIN and END."""
    PAD = "pad_token"
    UNK = "unk_token"
    CLS = "cls_token"
    SEP = "sep_token"
    MASK = "mask_token"


class ProblemType(StrEnum):
    """What a classification head answers; Hugging Face calls it `problem_type`."""

    SINGLE_LABEL = "single-label"
    """One of several classes: softmax."""
    MULTI_LABEL = "multi-label"
    """Each label for itself, yes or no: sigmoid."""
    REGRESSION = "regression"
    """A number, as it stands."""


class PoolerActivation(StrEnum):
    """What stands between the pooler and the heads that read it."""

    TANH = "tanh"
    """BERT, RoBERTa."""
    RELU = "relu"
    """DistilBERT."""


class Pooling(StrEnum):
    """How the states of a text's tokens become one vector."""

    MEAN = "mean"
    """The mean over all tokens, [CLS] and [SEP] too."""
    CLS = "cls"
    """The first token's state."""


class AlignmentAveraging(StrEnum):
    """Which of the weights between a source and its translation are averaged into one table."""

    ALL = "all"
    """Every layer's and head's."""
    BEST_LAYER = "best-layer"
    """The heads of the layer that points at words most sharply."""


class AttentionKind(StrEnum):
    """Whose attentions, layer by layer."""

    SELF = "self"
    """Of a GPT or BERT."""
    ENCODER = "encoder"
    DECODER = "decoder"
    """A decoder's look at its own text."""
    CROSS = "cross"
    """A decoder's look at the source."""


class HeadPattern(StrEnum):
    """What a head looks at, in words; `inspection.heads` says how each is measured."""

    PREVIOUS = "previous-token"
    FIRST = "first-token"
    """A sink: weight that has nowhere better to go."""
    DELIMITER = "delimiter"
    BAG = "bag-of-words"
    """Everything alike."""
    DUPLICATE = "duplicate"
    """The same token elsewhere."""
    INDUCTION = "induction"
    """What came after the same token before."""


class ViewKind(StrEnum):
    """Which view of a text on its way through a model."""

    HEADS = "heads"
    MAP = "map"
    NEURON = "neuron"
    RESIDUAL = "residual"
    LENS = "lens"
    IT = "it"
    EMBEDDINGS = "embeddings"
    LOGIT = "logit"
    EFFECT = "effect"
    TIMELINE = "timeline"


class CheckStatus(StrEnum):
    """What a check of `qkv verify` ended in."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"
    """It does not apply to the model, or what it needs is missing here; the reason is told."""


class DType(StrEnum):
    """The numbers that a model answers in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Half the memory, a GPU's fast products, three digits."""


class ProfileCategory(StrEnum):
    """What a model's time goes to."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "element-wise"
    """Activations, residual sums, masks: each number for itself."""
    EMBEDDING = "embedding"
    LOSS = "loss"
    SAMPLING = "sampling"
    """From logits to the next id."""
    OPTIMIZER = "optimizer"
    """The gradients' norm, clipping, the update."""
    COPIES = "copies"
    DATA = "data"
    """Making a batch."""
    BETWEEN = "between kernels"
    """Python, launching, waiting."""
