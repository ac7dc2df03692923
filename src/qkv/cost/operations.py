"""List and count the operations of one step for each of the four model families, including those of their blocks.

Each tensor saved for the backward pass is counted once, at the operation that produces it. The fused attention kernel
saves its output and one float32 value per row. Eager attention saves two n×n tensors: the output of softmax and the
weights that are multiplied with the values. On a CPU, torch saves more in two cases: RMSNorm saves the normalized
vectors, and the fused kernel falls back to n×n weights if there is a learned bias (T5).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import assert_never

from qkv.choices import Activation, AttentionKernel, HeadCombination, NormKind, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.operation import (
    LOGITS,
    SOFTMAX_OPS,
    Flops,
    MatMul,
    Operation,
    ParameterCounts,
    Phase,
    SavedTensors,
    group_parameters_by_part,
    linear_operation,
    logits_operation,
    lookup_operation,
    loss_operation,
    sum_decode_steps,
    sum_flops,
)
from qkv.cost.rnn import list_rnn_operations
from qkv.cost.workload import Mode, Workload

# Number of element-wise operations per element. Each addition, multiplication, comparison, exp, erf, tanh or division
# counts as one operation.
ACTIVATION_OPS = {Activation.RELU: 1, Activation.GELU: 5, Activation.GELU_TANH: 9, Activation.SILU: 4}
ROTARY_OPS = 4  # x·cos, negation, ·sin, addition


@dataclass(frozen=True, kw_only=True)
class NormCost:
    """The costs in which the kinds of norms differ."""

    ops: int
    """Element-wise operations per element, without the bias."""
    has_bias: bool
    """Whether the norm has a bias if `norm_bias` is set."""
    n_statistics: int
    """Numbers per row that are saved for the backward pass."""
    n_cpu_copies: int
    """Copies of the input that the norm saves on a CPU, where it may consist of several kernels."""


NORM_COSTS = {
    NormKind.LAYER: NormCost(ops=6, has_bias=True, n_statistics=2, n_cpu_copies=0),
    NormKind.RMS: NormCost(ops=4, has_bias=False, n_statistics=1, n_cpu_copies=1),
}
SCORE_BIAS_POSITIONS = (PositionKind.ALIBI, PositionKind.RELATIVE)
"""Position encodings that add a bias to each attention score."""


def attended_pairs(n_queries: int, n_keys: int, *, causal: bool, window: int | None) -> int:
    """Count the unmasked (query, key) pairs.

    The queries are the last positions of the key sequence.
    """
    if causal:
        reach = n_keys if window is None else window
        return _causal_pairs(n_keys, reach) - _causal_pairs(n_keys - n_queries, reach)
    if window is None or window >= n_keys:
        return n_queries * n_keys
    # A bidirectional window of w covers the diagonal and w - 1 diagonals on each side.
    return n_keys + 2 * ((window - 1) * n_keys - window * (window - 1) // 2)


def _causal_pairs(n: int, reach: int) -> int:
    """Compute Σ min(i, reach) for i = 1 … n."""
    full = min(n, reach)
    return full * (full + 1) // 2 + (n - full) * reach


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """A stack of Transformer blocks in one forward pass."""

    config: TransformerConfig
    prefix: str = ""
    n_layers: int
    batch_size: int
    n_queries: int
    n_keys: int
    causal: bool
    is_cached: bool = False
    n_source: int | None = None
    """Number of source positions for cross-attention, or None if the stack has no cross-attention."""
    kernel: AttentionKernel = AttentionKernel.FUSED
    on_gpu: bool = True

    def operations(self) -> list[Operation]:
        cross_attention = [] if self.n_source is None else self._attention_sublayer("cross_attention")
        return [
            *self._attention_sublayer("attention"),
            *cross_attention,
            self._norm("feed_forward"),
            *self._feed_forward(),
            self._residual_add("feed_forward"),
        ]

    @property
    def n_rows(self) -> int:
        """Total number of query positions in the batch."""
        return self.batch_size * self.n_queries

    def _attention_sublayer(self, sublayer: str) -> list[Operation]:
        return [
            self._norm(sublayer),
            *self._qkv_projections_and_rotary(sublayer),
            *self._attention_core(sublayer),
            *self._head_pooling_and_output_projection(sublayer),
            self._residual_add(sublayer),
        ]

    def _norm(self, sublayer: str) -> Operation:
        part = f"{self.prefix}blocks.{sublayer}_norm"
        return norm_operation(self.config, part, rows=self.n_rows, on_gpu=self.on_gpu, copies=self.n_layers)

    def _qkv_projections_and_rotary(self, sublayer: str) -> list[Operation]:
        config, part = self.config, f"{self.prefix}blocks.{sublayer}"
        n_attended = self.n_queries if sublayer == "attention" else self.n_source or 0
        rows = self.batch_size * n_attended
        # Eager attention repeats each key and value for its group of heads and saves the copies.
        n_saved_heads = config.n_heads if self.kernel is AttentionKernel.EAGER else config.n_kv_heads
        projections = [("q_proj", self.n_rows, config.n_heads, config.n_heads, config.d_head)]
        if sublayer == "attention" or not self.is_cached:
            projections += [
                ("k_proj", rows, config.n_kv_heads, n_saved_heads, config.d_head),
                ("v_proj", rows, config.n_kv_heads, n_saved_heads, config.d_value),
            ]
        operations = [
            linear_operation(
                part,
                name,
                rows=n,
                d_in=config.d_model,
                d_out=n_heads * width,
                bias=config.attention_bias,
                copies=self.n_layers,
                saved=SavedTensors(elements=n * n_saved * width, autocast_elements=n * config.d_model),
            )
            for name, n, n_heads, n_saved, width in projections
        ]
        if sublayer == "attention" and config.positions is PositionKind.ROTARY:
            n_rotated = self.n_rows * (config.n_heads + config.n_kv_heads) * config.d_head
            rotary = Operation(
                part=part,
                name="rotary",
                copies=self.n_layers,
                elementwise=ROTARY_OPS * n_rotated,
                reads=n_rotated,
                writes=n_rotated,
                kernels=10,
            )
            operations.append(rotary)
        return operations

    def _attention_core(self, sublayer: str) -> list[Operation]:
        """List the operations of attention: the scores, the softmax and the weighted sum of the values (mix)."""
        config, b, n = self.config, self.batch_size, self.n_queries
        is_self = sublayer == "attention"
        m = self.n_keys if is_self else self.n_source or 0
        pairs = attended_pairs(n, m, causal=self.causal, window=config.sliding_window) if is_self else n * m
        is_cached = self.is_cached
        square = b * config.n_heads * n * m
        queries, head_output_elements = b * n * config.n_heads * config.d_head, b * n * config.n_heads * config.d_value
        keys, values = b * m * config.n_kv_heads * config.d_head, b * m * config.n_kv_heads * config.d_value
        shared = {"part": f"{self.prefix}blocks.{sublayer}", "copies": self.n_layers}
        per_head = {"batch": b * config.n_heads, "rows": n}
        unmasked_fraction = Fraction(pairs, n * m)
        has_bias = is_self and config.positions in SCORE_BIAS_POSITIONS
        ops_per_score = SOFTMAX_OPS + config.scale_scores + has_bias + (pairs < n * m)
        return [
            Operation(
                **shared,
                name="scores",
                matmul=MatMul(**per_head, inner=config.d_head, columns=m),
                unmasked_fraction=unmasked_fraction,
                reads=queries + (0 if is_cached else keys),
                cache=keys if is_cached else 0,
                writes=square,
                onchip_writes=square,
            ),
            Operation(
                **shared,
                name="softmax",
                elementwise=ops_per_score * square,
                reads=square,
                writes=square,
                onchip_reads=square,
                onchip_writes=square,
                kernels=7,
                saved=self._saved_softmax_and_mask_tensors(square, n * m, is_masked=pairs < n * m, has_bias=has_bias),
            ),
            Operation(
                **shared,
                name="mix",
                matmul=MatMul(**per_head, inner=m, columns=config.d_value),
                unmasked_fraction=unmasked_fraction,
                reads=square + (0 if is_cached else values),
                cache=values if is_cached else 0,
                writes=head_output_elements,
                onchip_reads=square,
                saved=self._saved_out_proj_input(head_output_elements),
            ),
        ]

    def _saved_softmax_and_mask_tensors(
        self, n_scores: int, mask_elements: int, *, is_masked: bool, has_bias: bool
    ) -> SavedTensors:
        """Return the n×n tensors, or the statistics that replace them, that attention saves for the backward pass."""
        config = self.config
        rows = self.n_rows * config.n_heads
        is_learned = has_bias and config.positions is PositionKind.RELATIVE
        if self.kernel is AttentionKernel.EAGER:
            dropped = n_scores if config.dropout else 0
            # The output of softmax is float32 under autocast on a GPU or with a float32 bias. The weights that are
            # multiplied with the values are saved as well.
            softmax = (
                SavedTensors(fp32_elements=n_scores) if self.on_gpu or has_bias else SavedTensors(elements=n_scores)
            )
            mask_bytes = (mask_elements if is_masked else 0) + rows + dropped
            return softmax + SavedTensors(elements=n_scores + dropped, raw_bytes=mask_bytes)
        if is_learned and not self.on_gpu:
            return SavedTensors(fp32_elements=n_scores, raw_bytes=mask_elements if is_masked else 0)
        # The kernel receives a dense mask if the mask is not purely causal or if there is a bias.
        needs_dense_mask = has_bias or config.sliding_window is not None
        dense_mask = mask_elements * (config.n_heads if has_bias else 1) if needs_dense_mask else 0
        return SavedTensors(
            fp32_elements=rows, elements=dense_mask, raw_bytes=mask_elements if is_learned and is_masked else 0
        )

    def _saved_out_proj_input(self, head_output_elements: int) -> SavedTensors:
        """Return the tensors saved for the backward pass of the output projection.

        Pooled heads are summed before the projection, and the fused kernel also saves its own output.
        """
        if self.config.head_combination is HeadCombination.SPLIT:
            return SavedTensors(elements=head_output_elements)
        kernel_output = head_output_elements if self.kernel is AttentionKernel.FUSED else 0
        pooled = self.n_rows * self.config.d_model if self.config.output_projection else 0
        return SavedTensors(elements=kernel_output + pooled)

    def _head_pooling_and_output_projection(self, sublayer: str) -> list[Operation]:
        config, part = self.config, f"{self.prefix}blocks.{sublayer}"
        is_split = config.head_combination is HeadCombination.SPLIT
        d_in = config.n_heads * config.d_value if is_split else config.d_value
        operations = []
        if not is_split:
            n = self.n_rows * config.d_value
            n_heads = n * config.n_heads
            operations.append(
                Operation(part=part, name="pool", copies=self.n_layers, elementwise=n_heads, reads=n_heads, writes=n)
            )
        if config.output_projection:
            operations.append(
                linear_operation(
                    part,
                    "out_proj",
                    rows=self.n_rows,
                    d_in=d_in,
                    d_out=config.d_model,
                    bias=config.attention_bias,
                    copies=self.n_layers,
                )
            )
        return operations

    def _feed_forward(self) -> list[Operation]:
        config, part, rows = self.config, f"{self.prefix}blocks.feed_forward", self.n_rows
        hidden = rows * config.d_ff
        shared = {"rows": rows, "bias": config.feed_forward_bias, "copies": self.n_layers}
        up = {**shared, "d_in": config.d_model, "d_out": config.d_ff}
        # The gradient of ReLU requires only its output. The gradients of the other activations require their input.
        saved_input = SavedTensors(autocast_elements=rows * config.d_model)
        is_relu = config.activation is Activation.RELU
        saved_activation_input = saved_input if is_relu else saved_input + SavedTensors(elements=hidden)
        activation = Operation(
            part=part,
            name="activation",
            copies=self.n_layers,
            elementwise=(ACTIVATION_OPS[config.activation] + config.gated) * hidden,
            reads=hidden * (2 if config.gated else 1),
            writes=hidden,
            kernels=2 if config.gated else 1,
            saved=SavedTensors(elements=hidden * (2 if config.gated else 1)),
        )
        down_proj = linear_operation(part, "down_proj", **shared, d_in=config.d_ff, d_out=config.d_model)
        if not config.gated:
            return [linear_operation(part, "up_proj", **up, saved=saved_activation_input), activation, down_proj]
        return [
            linear_operation(part, "gate_proj", **up, saved=saved_activation_input),
            linear_operation(part, "up_proj", **up, saved=saved_input + SavedTensors(elements=hidden)),
            activation,
            down_proj,
        ]

    def _residual_add(self, sublayer: str) -> Operation:
        n = self.n_rows * self.config.d_model
        return Operation(
            part=f"{self.prefix}blocks.{sublayer}_out",
            name="add",
            copies=self.n_layers,
            elementwise=n,
            reads=2 * n,
            writes=n,
            autocast_fp32=True,
            saved=SavedTensors(fp32_elements=n, raw_bytes=n if self.config.dropout else 0),
        )


def norm_operation(config: TransformerConfig, part: str, *, rows: int, on_gpu: bool, copies: int = 1) -> Operation:
    """Build the operation for a norm over `rows` vectors.

    The operation saves the input of the next matmul and the statistics of each row. The input of the norm is counted at
    the operation that produces it.
    """
    cost = NORM_COSTS[config.norm]
    has_bias = cost.has_bias and config.norm_bias
    n, width = rows * config.d_model, config.d_model * (2 if has_bias else 1)
    statistics, normalized = rows * cost.n_statistics, 0 if on_gpu else n * cost.n_cpu_copies
    return Operation(
        part=part,
        name="norm",
        copies=copies,
        elementwise=n * (cost.ops + has_bias),
        parameters=width,
        weights=width,
        reads=n,
        writes=n,
        autocast_fp32=True,
        saved=SavedTensors(elements_without_autocast=n, fp32_elements=statistics + normalized),
    )


def list_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    """List the operations of a step in execution order. The parts have the same names as the modules of the model."""
    workload.check_supported_by(config)
    match workload.mode:
        case Mode.GENERATE:
            return _generation_operations(config, workload)
        case Mode.TRAIN:
            operations = _single_pass_operations(config, workload)
            return [*operations, *(loss_operation(op) for op in operations if op.name == LOGITS)]
        case _:
            return _single_pass_operations(config, workload)


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model without allocating them."""
    return group_parameters_by_part(list_operations(config, Workload(batch_size=1, seq_len=1)))


def count_flops(config: ModelConfig, workload: Workload) -> Flops:
    """Count the FLOPs of one step of a model."""
    return sum_flops(list_operations(config, workload), workload)


def _generation_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    """List the operations of the prefill, followed by those of all decode steps combined.

    The combined costs are exact because each size grows linearly from step to step.
    """
    prefill = workload.replace(mode=Mode.PREFILL, n_new_tokens=None, logits_to_keep=workload.logits_to_keep or 1)
    operations = [replace(op, phase=Phase.PREFILL) for op in _single_pass_operations(config, prefill)]
    # Once the sliding window is full, keys are masked and the sizes grow differently. The steps before and after that
    # point are therefore summed separately.
    window = config.sliding_window if isinstance(config, TransformerConfig) else None
    first, last = workload.seq_len + 1, workload.final_seq_len
    edge = last if window is None else min(max(window, workload.seq_len), last)
    for start, end in ((first, edge), (edge + 1, last)):
        if start <= end:
            steps = [
                _single_pass_operations(
                    config, workload.replace(mode=Mode.DECODE, n_new_tokens=None, logits_to_keep=None, seq_len=n)
                )
                for n in (start, end)
            ]
            operations += [
                sum_decode_steps(first_op, last_op, end - start + 1) for first_op, last_op in zip(*steps, strict=True)
            ]
    return operations


def _single_pass_operations(config: ModelConfig, workload: Workload) -> list[Operation]:
    match config:
        case GPTConfig():
            return _gpt_operations(config, workload)
        case BERTConfig():
            return _bert_operations(config, workload)
        case Seq2SeqConfig():
            return _seq2seq_operations(config, workload)
        case RNNConfig():
            return list_rnn_operations(config, workload)
        case _:
            assert_never(config)


def block_stacks(config: ModelConfig, workload: Workload) -> list[BlockStack]:
    """List the block stacks that one pass runs through, in order. An RNN has no block stacks."""
    shared = {"batch_size": workload.batch_size, "kernel": workload.kernel, "on_gpu": workload.on_gpu}
    is_decode = workload.mode is Mode.DECODE
    sizes = {**shared, "n_queries": workload.n_queries, "n_keys": workload.seq_len, "is_cached": is_decode}
    match config:
        case GPTConfig():
            return [BlockStack(config=config, n_layers=config.n_layers, causal=config.causal, **sizes)]
        case BERTConfig():
            return [BlockStack(config=config, n_layers=config.n_layers, causal=False, **sizes)]
        case Seq2SeqConfig():
            source = {**shared, "n_queries": workload.n_source, "n_keys": workload.n_source}
            encoder = BlockStack(
                config=config, **source, prefix="encoder.", n_layers=config.n_encoder_layers, causal=False
            )
            sizes |= {"n_layers": config.n_decoder_layers, "n_source": workload.n_source}
            decoder = BlockStack(config=config, **sizes, prefix="decoder.", causal=True)
            # A decode step reads the encoder output from the cache.
            return [decoder] if is_decode else [encoder, decoder]
        case RNNConfig():
            return []


def _operations_up_to_final_states(
    config: TransformerConfig,
    workload: Workload,
    stack: BlockStack,
    *,
    source_vocab_size: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:
    """List the operations from token ids to the final states of a block stack."""
    prefix, rows = stack.prefix, stack.n_rows
    return [
        *_embedding_operations(
            config, workload, rows, prefix=prefix, source_vocab_size=source_vocab_size, n_segments=n_segments
        ),
        *_relative_bias_operations(config, stack.n_queries, stack.n_keys, prefix=prefix),
        *stack.operations(),
        *_final_norm_operations(config, workload, rows, prefix=prefix),
    ]


def _gpt_operations(config: GPTConfig, workload: Workload) -> list[Operation]:
    (stack,) = block_stacks(config, workload)
    return [
        *_operations_up_to_final_states(config, workload, stack),
        _unembedding_operation(config, workload.n_logit_rows),
    ]


def _bert_operations(config: BERTConfig, workload: Workload) -> list[Operation]:
    """List the operations of the encoder and every configured head.

    Heads other than the masked-LM head run only on [CLS].
    """
    (stack,) = block_stacks(config, workload)
    encoder = _operations_up_to_final_states(config, workload, stack, n_segments=config.n_segments or None)
    return [*encoder, *_bert_head_operations(config, workload)]


def _bert_head_operations(config: BERTConfig, workload: Workload) -> list[Operation]:
    d, rows, batch_size = config.d_model, workload.n_logit_rows, workload.batch_size
    heads = []
    if config.pooler:
        pooled = {"rows": batch_size, "d_in": d, "bias": True}
        heads.append(
            linear_operation("pooler", "project", **pooled, d_out=d, saved=SavedTensors(elements=batch_size * d))
        )
        if config.next_sentence_head:
            heads.append(linear_operation("next_sentence", "project", **pooled, d_out=2))
        if config.n_classes is not None:
            heads.append(linear_operation("classifier", "project", **pooled, d_out=config.n_classes))
    if config.masked_lm_head:
        n, part = rows * d, "masked_lm"
        heads += [
            linear_operation(
                part,
                "dense",
                rows=rows,
                d_in=d,
                d_out=d,
                bias=True,
                saved=SavedTensors(elements=n, autocast_elements=n),
            ),
            Operation(
                part=part,
                name="activation",
                elementwise=ACTIVATION_OPS[config.activation] * n,
                reads=n,
                writes=n,
                saved=SavedTensors(fp32_elements=n),
            ),
            norm_operation(config, part, rows=rows, on_gpu=workload.on_gpu),
            _unembedding_operation(config, rows, part=part),
        ]
    return heads


def _seq2seq_operations(config: Seq2SeqConfig, workload: Workload) -> list[Operation]:
    *encoder_stacks, decoder_stack = block_stacks(config, workload)
    encoder: list[Operation] = []
    for stack in encoder_stacks:
        embedding, *rest = _operations_up_to_final_states(
            config, workload, stack, source_vocab_size=config.source_vocab_size
        )
        if config.d_patch is not None:
            embedding = _patch_embedding_operation(embedding.part, stack.n_rows, config.d_patch, config.d_model)
        encoder += [embedding, *rest]
    decoder = _operations_up_to_final_states(config, workload, decoder_stack)
    return [*encoder, *decoder, _unembedding_operation(config, workload.n_logit_rows)]


def _patch_embedding_operation(part: str, rows: int, d_patch: int, d_model: int) -> Operation:
    """Build the operation for the linear embedding of image patches, which replaces the token lookup.

    The gradient of the patches is not needed.
    """
    saved = SavedTensors(autocast_elements=rows * d_patch)
    op = linear_operation(part, "project", rows=rows, d_in=d_patch, d_out=d_model, bias=False, saved=saved)
    return replace(op, skipped_gradient_macs=rows * d_patch * d_model)


def _embedding_operations(
    config: TransformerConfig,
    workload: Workload,
    rows: int,
    *,
    prefix: str = "",
    source_vocab_size: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:
    """List the operations of the token, segment and position embeddings and the embedding norm.

    `source_vocab_size` is set for an encoder. A table that is shared by the encoder and decoder is counted in the
    encoder.
    """
    d, part = config.d_model, f"{prefix}embedding"
    is_shared = source_vocab_size is None and isinstance(config, Seq2SeqConfig) and config.share_embeddings
    n_entries = config.vocab_size if source_vocab_size is None else source_vocab_size
    operations = [
        lookup_operation(f"{part}.token", rows=rows, n_entries=n_entries, width=d, parameters=0 if is_shared else None)
    ]
    if n_segments is not None:
        operations.append(lookup_operation(f"{part}.segment", rows=rows, n_entries=n_segments, width=d, add=True))
    position = f"{part}.position"
    match config.positions:
        case PositionKind.LEARNED:
            n_entries = config.context_length + config.position_offset
            operations.append(lookup_operation(position, rows=rows, n_entries=n_entries, width=d, add=True))
        case PositionKind.SINUSOIDAL:
            n = rows * d
            operations.append(
                Operation(part=position, name="add", elementwise=n, reads=n, writes=n, autocast_fp32=True)
            )
        case PositionKind.CONCATENATED:
            saved = SavedTensors(elements_without_autocast=2 * rows * d, autocast_elements=2 * rows * d)
            operations.append(
                linear_operation(position, "project", rows=rows, d_in=2 * d, d_out=d, bias=False, saved=saved)
            )
        case _:
            pass
    # The residual stream, which the first block reads and the backward pass of its norm needs.
    operations.append(Operation(part=part, name="sum", saved=SavedTensors(fp32_elements=rows * d)))
    if config.embedding_norm:
        operations.append(norm_operation(config, f"{part}.norm", rows=rows, on_gpu=workload.on_gpu))
    return operations


def _relative_bias_operations(
    config: TransformerConfig, n_queries: int, n_keys: int, *, prefix: str = ""
) -> list[Operation]:
    """List the lookup of T5's relative position bias, which all layers of a stack share.

    The lookup saves int64 indices.
    """
    if config.positions is not PositionKind.RELATIVE:
        return []
    pairs = n_queries * n_keys
    lookup = Operation(
        part=f"{prefix}relative_positions",
        name="lookup",
        parameters=config.relative_buckets * config.n_heads,
        weights=pairs * config.n_heads,
        writes=pairs * config.n_heads,
        autocast_fp32=True,
        saved=SavedTensors(raw_bytes=8 * pairs),
    )
    return [lookup]


def _final_norm_operations(
    config: TransformerConfig, workload: Workload, rows: int, *, prefix: str = ""
) -> list[Operation]:
    return (
        [norm_operation(config, f"{prefix}final_norm", rows=rows, on_gpu=workload.on_gpu)] if config.final_norm else []
    )


def _unembedding_operation(config: TransformerConfig, rows: int, *, part: str = "unembedding") -> Operation:
    return logits_operation(
        part,
        rows=rows,
        d_model=config.d_model,
        vocab_size=config.vocab_size,
        is_tied=config.tie_embeddings,
        bias=config.unembedding_bias,
    )
