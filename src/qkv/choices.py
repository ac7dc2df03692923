"""Enums used by configs, modules, command-line options and file formats."""

from enum import StrEnum


class HeadCombination(StrEnum):
    """Method for combining the outputs of the attention heads."""

    SPLIT = "split"
    """Concatenate the outputs of the n_heads heads, each of width d_value, and project the result."""
    POOLED = "pooled"
    """Sum the outputs of the heads, each of which has the full width d_model."""
    POOLED_MEAN = "pooled-mean"
    """Average the outputs of the heads, each of which has the full width d_model."""


class NormKind(StrEnum):
    """Kind of normalization layer. `make_norm` in `nn/norm.py` creates it; see docs/howto/add-a-block.md."""

    LAYER = "layer"
    RMS = "rms"


class NormPosition(StrEnum):
    """Placement of the norms in a Transformer block."""

    PRE = "pre"
    """Normalize the input of each sub-layer (GPT-2 and later)."""
    POST = "post"
    """Normalize the residual stream after adding each sub-layer's output (arXiv:1706.03762, BERT, lecture E)."""


class Activation(StrEnum):
    """Activation function for the feed-forward layers."""

    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu-tanh"
    SILU = "silu"


class PositionKind(StrEnum):
    """Kind of position encoding."""

    NONE = "none"
    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"
    CONCATENATED = "concatenated"
    ROTARY = "rotary"
    ALIBI = "alibi"
    RELATIVE = "relative"


class SinusoidStyle(StrEnum):
    """Column order in sinusoidal position encodings."""

    INTERLEAVED = "interleaved"
    """sin, cos, sin, cos, …, where pair i = 0, 1, … has frequency 10000^(−2i/d) (lecture B, arXiv:1706.03762)."""
    INTERLEAVED_FROM_ONE = "interleaved-from-one"
    """Same as `INTERLEAVED`, but with i = 1, 2, …, d/2 (lecture E)."""
    HALVES = "halves"
    """All sines, then all cosines (Marian)."""


class RNNAttentionScore(StrEnum):
    """Attention score function for an RNN decoder."""

    NONE = "none"
    """No attention. The decoder receives only the last encoder state."""
    DOT = "dot"
    GENERAL = "general"
    ADDITIVE = "additive"


class CellKind(StrEnum):
    """Kind of recurrent cell."""

    GRU = "gru"
    LSTM = "lstm"


class AttentionKernel(StrEnum):
    """Implementation of attention."""

    EAGER = "eager"
    """Explicit scores and softmax. The other implementation must produce the same results."""
    FUSED = "fused"
    """`torch.nn.functional.scaled_dot_product_attention`."""


class OptimizerKind(StrEnum):
    """Optimizer used for training."""

    ADAMW = "adamw"
    MUON = "muon"
    """Muon for the matrices of the blocks and AdamW for all other parameters."""


class ScheduleKind(StrEnum):
    """Learning-rate schedule after the warmup."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"
    """Constant after the warmup, with a linear decay at the end (arXiv:2404.06395)."""
    NOAM = "noam"
    """Proportional to 1/√step, independent of the number of steps (eq. 3 of arXiv:1706.03762)."""


class Precision(StrEnum):
    """Numeric precision used for training."""

    AUTO = "auto"
    """bf16 on a GPU and fp32 on a CPU."""
    FP32 = "fp32"
    BF16 = "bf16"
    """Mixed precision: matmuls in bfloat16, weights and optimizer updates in float32."""


class TokenizerKind(StrEnum):
    """Tokenization algorithm."""

    BPE = "bpe"
    """Byte-level byte-pair encoding (GPT-2). It can encode any text without unknown tokens."""
    WORDPIECE = "wordpiece"
    """WordPiece (BERT). Continuations of a word start with ##."""
    UNIGRAM = "unigram"
    """The most likely segmentation under a unigram language model (SentencePiece, T5)."""
    CHARACTER = "char"
    """One token per character."""


class SpecialTokenStyle(StrEnum):
    """Set of special tokens for a new tokenizer, with the template that adds them to encoded texts."""

    GPT = "gpt"
    """<|endoftext|> only. Texts are encoded without special tokens."""
    BERT = "bert"
    """[PAD] [UNK] [CLS] [SEP] [MASK]. Texts are encoded as [CLS] A [SEP], and pairs as [CLS] A [SEP] B [SEP]."""
    SEQ2SEQ = "seq2seq"
    """<pad> <bos> <eos> <unk>. Texts are encoded as <bos> A <eos>."""


class SpecialToken(StrEnum):
    """Role of a special token. The enum values are the keys used in Hugging Face's `tokenizer_config.json`."""

    BOS = "bos_token"
    EOS = "eos_token"
    """Marks the end of a text. In GPT, <|endoftext|> serves as both BOS and EOS."""
    PAD = "pad_token"
    UNK = "unk_token"
    CLS = "cls_token"
    SEP = "sep_token"
    MASK = "mask_token"


class ProblemType(StrEnum):
    """Kind of classification problem. Corresponds to `problem_type` in Hugging Face configs."""

    SINGLE_LABEL = "single-label"
    """Each text belongs to exactly one of several classes (softmax)."""
    MULTI_LABEL = "multi-label"
    """Each text may have any number of labels, and each label has its own sigmoid."""
    REGRESSION = "regression"
    """The model predicts a single number, without an activation function."""


class PoolerActivation(StrEnum):
    """Activation function of the pooler."""

    TANH = "tanh"
    """Used by BERT and RoBERTa."""
    RELU = "relu"
    """Used by DistilBERT."""


class Pooling(StrEnum):
    """Method for combining token states into a sentence embedding."""

    MEAN = "mean"
    """Average all token states, including those of [CLS] and [SEP]."""
    CLS = "cls"
    """Use the state of the first token."""


class AlignmentLayerAveraging(StrEnum):
    """Choice of the cross-attention weights to average when computing a word alignment."""

    ALL = "all"
    """Average all heads in all layers."""
    BEST_LAYER = "best-layer"
    """Average all heads in the layer with the sharpest attention weights."""


class AttentionStack(StrEnum):
    """Stack of attention layers in a model. GPT and BERT have one stack, and encoder–decoders have several."""

    SELF = "self"
    """Self-attention in a GPT or BERT model."""
    ENCODER = "encoder"
    """Self-attention in an encoder."""
    DECODER = "decoder"
    """Self-attention in a decoder."""
    CROSS = "cross"
    """Cross-attention from a decoder to the source."""


class HeadPattern(StrEnum):
    """Attention pattern of a head. `inspection.heads` defines how each pattern is measured."""

    PREVIOUS = "previous-token"
    """The head attends to the previous token."""
    FIRST = "first-token"
    """The head attends to the first token, which serves as an attention sink."""
    DELIMITER = "delimiter"
    """The head attends to punctuation and separator tokens."""
    BAG = "bag-of-words"
    """The head attends to all tokens equally."""
    DUPLICATE = "duplicate"
    """The head attends to other occurrences of the same token."""
    INDUCTION = "induction"
    """The head attends to the token that followed an earlier occurrence of the same token."""


class ViewKind(StrEnum):
    """Kind of view of a model's activations."""

    HEADS = "heads"
    MAP = "map"
    NEURON = "neuron"
    RESIDUAL = "residual"
    LOGIT_LENS = "logit-lens"
    COREFERENCE = "coreference"
    EMBEDDINGS = "embeddings"
    LOGIT_ATTRIBUTION = "logit-attribution"
    EFFECT = "effect"
    TIMELINE = "timeline"


class CheckStatus(StrEnum):
    """Result of a `qkv verify` check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"
    """The check does not apply to the model or requires a missing dependency. The result contains the reason."""


class BackendName(StrEnum):
    """Implementation that computes a model's outputs. All of them agree with the eager one up to rounding."""

    AUTO = "auto"
    """The fastest backend that supports the model."""
    EAGER = "eager"
    """The reference implementation in plain PyTorch, which supports every model on every device."""
    CPU = "cpu"
    """Prepacked weights and fused layers on a CPU."""
    CUDA = "cuda"
    """Triton kernels and CUDA graphs on an NVIDIA GPU."""


class InferenceDType(StrEnum):
    """Data type used for weights and activations during inference."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Uses half the memory and speeds up matmuls on a GPU, with a precision of about three significant digits."""


class ProfileCategory(StrEnum):
    """Category that a profile assigns to an operation."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "element-wise"
    """Activations, residual additions and masks."""
    EMBEDDING = "embedding"
    LOSS = "loss"
    SAMPLING = "sampling"
    """Choosing the next token from the logits."""
    OPTIMIZER = "optimizer"
    """Gradient norm, clipping and parameter update."""
    COPIES = "copies"
    """Copying data between host and device, or within a device."""
    DATA = "data"
    """Preparing batches."""
    BETWEEN = "between kernels"
    """Python code, kernel launches and synchronization."""
