"""What a stack of Transformer blocks computes, operation by operation.

Kept for backward, by convention: each tensor once, at the operation that made it; the fused kernel keeps its
result and one number a row, the plain road keeps the n×n weights twice (softmax's own and the mixed ones).
torch on a CPU keeps more in two places: an RMSNorm its normed vectors, and under a learned bias (T5) its fused
kernel steps back to n×n weights.
"""

from dataclasses import dataclass
from fractions import Fraction

from qkv.choices import Activation, HeadLayout, Kernel, NormKind, PositionKind
from qkv.config import TransformerConfig
from qkv.cost.operation import Kept, Operation, Product, linear

# Element-wise operations a number: add, multiply, compare, exp, erf, tanh and divide are one each.
SOFTMAX = 5  # largest, subtract, exp, sum, divide
NORM = {NormKind.LAYER: 6, NormKind.RMS: 4}  # LayerNorm's β is one more
ACTIVATION = {Activation.RELU: 1, Activation.GELU: 5, Activation.GELU_TANH: 9, Activation.SILU: 4}
ROTATION = 4  # x·cos, negate, ·sin, add
BIASED = (PositionKind.ALIBI, PositionKind.RELATIVE)
"""Positions that enter as a bias of the scores, one for each pair and head."""


def seen_pairs(n_queries: int, n_keys: int, *, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs a mask lets look; the queries are the last of the keys' positions."""
    if causal:
        reach = n_keys if window is None else window
        return _seen_before(n_keys, reach) - _seen_before(n_keys - n_queries, reach)
    if window is None or window >= n_keys:
        return n_queries * n_keys
    return n_keys + 2 * ((window - 1) * n_keys - window * (window - 1) // 2)


def _seen_before(n: int, reach: int) -> int:
    """Σ min(i, reach) for i = 1 … n."""
    full = min(n, reach)
    return full * (full + 1) // 2 + (n - full) * reach


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack of blocks in one pass."""

    config: TransformerConfig
    prefix: str = ""
    n_layers: int
    batch: int
    n_queries: int
    n_keys: int
    causal: bool
    is_cached: bool = False
    n_source: int | None = None
    """Positions of the source that cross-attention looks at; None: there is no cross-attention."""
    kernel: Kernel = Kernel.FUSED
    on_gpu: bool = True

    def operations(self) -> list[Operation]:
        cross = [] if self.n_source is None else [*self._sublayer("cross"), *self._residual("cross")]
        return [
            *self._sublayer("attention"),
            *self._residual("attention"),
            *cross,
            self._norm("feedforward"),
            *self._feedforward(),
            *self._residual("feedforward"),
        ]

    @property
    def n_rows(self) -> int:
        return self.batch * self.n_queries

    def _sublayer(self, which: str) -> list[Operation]:
        return [self._norm(which), *self._projections(which), *self._core(which), *self._output(which)]

    def _norm(self, which: str) -> Operation:
        part = f"{self.prefix}blocks.{which}_norm"
        return norm(self.config, part, rows=self.n_rows, on_gpu=self.on_gpu, copies=self.n_layers)

    def _projections(self, which: str) -> list[Operation]:
        config, part = self.config, f"{self.prefix}blocks.{which}"
        n_looked_at = self.n_queries if which == "attention" else self.n_source or 0
        rows = self.batch * n_looked_at
        # The plain road repeats each key and value for its group of heads and keeps the copies.
        n_kept = config.n_heads if self.kernel is Kernel.PLAIN else config.n_kv_heads
        shapes = [("query", self.n_rows, config.n_heads, config.n_heads, config.d_head)]
        if which == "attention" or not self.is_cached:
            shapes += [
                ("key", rows, config.n_kv_heads, n_kept, config.d_head),
                ("value", rows, config.n_kv_heads, n_kept, config.d_value),
            ]
        made = [
            linear(
                part, name, rows=n, d_in=config.d_model, d_out=heads * width, bias=config.attention_bias,
                copies=self.n_layers, kept=Kept(numbers=n * held * width, copies=n * config.d_model),
            )
            for name, n, heads, held, width in shapes
        ]  # fmt: skip
        if which == "attention" and config.positions is PositionKind.ROTARY:
            turned = self.n_rows * (config.n_heads + config.n_kv_heads) * config.d_head
            rotation = Operation(
                part=part, name="rotation", copies=self.n_layers, elementwise=ROTATION * turned,
                reads=turned, writes=turned, kernels=10,
            )  # fmt: skip
            made.append(rotation)
        return made

    def _core(self, which: str) -> list[Operation]:
        config, b, n = self.config, self.batch, self.n_queries
        is_self = which == "attention"
        m = self.n_keys if is_self else self.n_source or 0
        seen = seen_pairs(n, m, causal=self.causal, window=config.sliding_window) if is_self else n * m
        is_cached = self.is_cached
        square = b * config.n_heads * n * m
        queries, results = b * n * config.n_heads * config.d_head, b * n * config.n_heads * config.d_value
        keys, values = b * m * config.n_kv_heads * config.d_head, b * m * config.n_kv_heads * config.d_value
        share = {"part": f"{self.prefix}blocks.{which}", "copies": self.n_layers}
        looks = {"groups": b * config.n_heads, "rows": n}
        visible = Fraction(seen, n * m)
        has_bias = is_self and config.positions in BIASED
        per_score = SOFTMAX + config.scale_scores + has_bias + (seen < n * m)
        return [
            Operation(
                **share, name="scores", product=Product(**looks, inner=config.d_head, columns=m), visible=visible,
                reads=queries + (0 if is_cached else keys), cache=keys if is_cached else 0, writes=square,
                inside_writes=square,
            ),
            Operation(
                **share, name="softmax", elementwise=per_score * square, reads=square, writes=square,
                inside_reads=square, inside_writes=square, kernels=7,
                kept=self._kept_weights(square, n * m, is_masked=seen < n * m, has_bias=has_bias),
            ),
            Operation(
                **share, name="mix", product=Product(**looks, inner=m, columns=config.d_value), visible=visible,
                reads=square + (0 if is_cached else values), cache=values if is_cached else 0, writes=results,
                inside_reads=square, kept=self._kept_results(results),
            ),
        ]  # fmt: skip

    def _kept_weights(self, square: int, pairs: int, *, is_masked: bool, has_bias: bool) -> Kept:
        config = self.config
        rows = self.n_rows * config.n_heads
        is_learned = has_bias and config.positions is PositionKind.RELATIVE
        if self.kernel is Kernel.PLAIN:
            dropped = square if config.dropout else 0
            # Softmax's result, at 32 bits under a GPU's mixed precision or a bias of 32, and what is mixed.
            softmax = Kept(wide=square) if self.on_gpu or has_bias else Kept(numbers=square)
            flags = (pairs if is_masked else 0) + rows + dropped
            return softmax + Kept(numbers=square + dropped, flags=flags)
        if is_learned and not self.on_gpu:
            return Kept(wide=square, flags=pairs if is_masked else 0)
        # The kernel is given a table where the mask is more than a triangle, or where there is a bias.
        given = pairs * (config.n_heads if has_bias else 1) if has_bias or config.sliding_window is not None else 0
        return Kept(wide=rows, numbers=given, flags=pairs if is_learned and is_masked else 0)

    def _kept_results(self, results: int) -> Kept:
        """What the output projection reads; pooled heads are added first, and the fused kernel keeps its own."""
        if self.config.head_layout is HeadLayout.SPLIT:
            return Kept(numbers=results)
        own = results if self.kernel is Kernel.FUSED else 0
        return Kept(numbers=own + (self.n_rows * self.config.d_model if self.config.output_projection else 0))

    def _output(self, which: str) -> list[Operation]:
        config, part = self.config, f"{self.prefix}blocks.{which}"
        is_split = config.head_layout is HeadLayout.SPLIT
        joined = config.n_heads * config.d_value if is_split else config.d_value
        made = []
        if not is_split:
            n = self.n_rows * config.d_value
            heads = n * config.n_heads
            pool = Operation(part=part, name="pool", copies=self.n_layers, elementwise=heads, reads=heads, writes=n)
            made.append(pool)
        if config.output_projection:
            made.append(
                linear(
                    part, "output", rows=self.n_rows, d_in=joined, d_out=config.d_model, bias=config.attention_bias,
                    copies=self.n_layers,
                )
            )  # fmt: skip
        return made

    def _feedforward(self) -> list[Operation]:
        config, part, rows = self.config, f"{self.prefix}blocks.feedforward", self.n_rows
        hidden = rows * config.d_ff
        shape = {"rows": rows, "bias": config.feed_forward_bias, "copies": self.n_layers}
        inward = {**shape, "d_in": config.d_model, "d_out": config.d_ff}
        # ReLU goes back from its result; the others need what they were given.
        read = Kept(copies=rows * config.d_model)
        entered = read if config.activation is Activation.RELU else read + Kept(numbers=hidden)
        cost = ACTIVATION[config.activation] + config.gated
        activation = Operation(
            part=part, name="activation", copies=self.n_layers, elementwise=cost * hidden,
            reads=hidden * (2 if config.gated else 1), writes=hidden, kernels=2 if config.gated else 1,
            kept=Kept(numbers=hidden * (2 if config.gated else 1)),
        )  # fmt: skip
        contract = linear(part, "contract", **shape, d_in=config.d_ff, d_out=config.d_model)
        if not config.gated:
            return [linear(part, "expand", **inward, kept=entered), activation, contract]
        return [
            linear(part, "gate", **inward, kept=entered),
            linear(part, "expand", **inward, kept=read + Kept(numbers=hidden)),
            activation,
            contract,
        ]

    def _residual(self, which: str) -> list[Operation]:
        n = self.n_rows * self.config.d_model
        kept = Kept(wide=n, flags=n if self.config.dropout else 0)
        part = f"{self.prefix}blocks.{which}_write"
        return [
            Operation(
                part=part, name="add", copies=self.n_layers, elementwise=n, reads=2 * n, writes=n, is_wide=True,
                kept=kept,
            )
        ]  # fmt: skip


def norm(config: TransformerConfig, part: str, *, rows: int, on_gpu: bool, copies: int = 1) -> Operation:
    """Keeps what the next product reads, and one or two numbers a row; its input is kept by who made it.

    An RMSNorm on a CPU is several kernels, which keep the normed vectors too.
    """
    is_layer = config.norm is NormKind.LAYER
    has_bias = is_layer and config.norm_bias
    n, width = rows * config.d_model, config.d_model * (2 if has_bias else 1)
    return Operation(
        part=part,
        name="norm",
        copies=copies,
        elementwise=n * (NORM[config.norm] + has_bias),
        parameters=width,
        weights=width,
        reads=n,
        writes=n,
        is_wide=True,
        kept=Kept(whole=n, wide=rows * (2 if is_layer else 1) + (0 if is_layer or on_gpu else n)),
    )
