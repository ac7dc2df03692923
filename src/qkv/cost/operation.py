"""What one operation costs: products, element-wise work, numbers moved, numbers kept. All else is a sum of these."""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction

from qkv.cost.workload import Precision


class Phase(StrEnum):
    """When in a step of work something is computed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward work that checkpointing does once more."""
    UPDATE = "update"
    PREFILL = "prefill"
    DECODE = "decode"
    """All decoding steps of one generation together."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`groups` matrix products side by side, each rows×inner · inner×columns."""

    groups: int = 1
    rows: int
    inner: int
    columns: int

    @property
    def multiply_adds(self) -> int:
        return self.groups * self.rows * self.inner * self.columns

    @property
    def gradients(self) -> "tuple[Product, Product]":
        """Towards the left factor, and towards the right one."""
        return (
            Product(groups=self.groups, rows=self.rows, inner=self.columns, columns=self.inner),
            Product(groups=self.groups, rows=self.inner, inner=self.rows, columns=self.columns),
        )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What an operation's result leaves in memory until backward has used it."""

    numbers: int = 0
    """At the products' precision."""
    wide: int = 0
    """Numbers that mixed precision keeps at 32 bits: residual stream, norm statistics."""
    whole: int = 0
    """Numbers that mixed precision does not keep: it keeps the copies that products made of them."""
    copies: int = 0
    """Those copies, at 16 bits: one for each product that reads a wide tensor."""
    flags: int = 0
    """Bytes whatever the precision: masks, indices, log-probabilities."""

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __mul__(self, times: int) -> "Kept":
        return Kept(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    def n_bytes(self, dtype: Precision) -> int:
        fixed = self.numbers * dtype.narrow + self.wide * dtype.wide + self.flags
        return fixed + (self.copies * dtype.narrow if dtype is Precision.MIXED else self.whole * dtype.wide)


NOTHING = Kept()
LOGITS = "logits"
LOSS = "loss"
LOG_SOFTMAX = 5
"""Element-wise operations a logit: largest, subtract, exp, sum, subtract."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of step of a model, as it is run once; `runs` says how often.

    Numbers moved are told apart by what they are: `weights` and `cache` are read, `reads` and `writes` are
    activations. `inside_reads` and `inside_writes` of these never leave the chip where attention is one kernel.
    """

    part: str
    """Where it stands in the model, without the layer's number: `decoder.blocks.cross`."""
    name: str
    copies: int = 1
    """Layers (and directions), each with weights of its own."""
    steps: int = 1
    """Runs that must wait for one another, with the same weights: more than 1 in a recurrence alone."""
    product: Product | None = None
    visible: Fraction = Fraction(1)
    """Share of the product that a mask lets count; an unmasked kernel computes the rest too."""
    no_gradient: int = 0
    """Multiply–adds of backward that nobody needs: towards a recurrence's zero first state, towards a picture."""
    elementwise: int = 0
    parameters: int = 0
    weights: int = 0
    cache: int = 0
    reads: int = 0
    writes: int = 0
    inside_reads: int = 0
    inside_writes: int = 0
    is_wide: bool = False
    """Reads and writes 32 bits under mixed precision: the residual stream, norms, the loss, recurrences."""
    kernels: int = 1
    """Kernels that torch starts for one run, about."""
    phase: Phase = Phase.FORWARD
    kept: Kept = NOTHING

    @property
    def runs(self) -> int:
        return self.copies * self.steps

    @property
    def flops(self) -> int:
        """Of the forward pass's products, 2 a multiply–add, as an unmasked kernel executes them."""
        return 0 if self.product is None else 2 * self.product.multiply_adds * self.runs

    @property
    def useful_flops(self) -> int:
        return int(self.flops * self.visible)

    @property
    def backward_flops(self) -> int:
        """Two products for one: towards either factor."""
        return 2 * self.flops - 2 * self.no_gradient * self.copies

    @property
    def useful_backward_flops(self) -> int:
        return int(self.backward_flops * self.visible)

    @property
    def elementwise_flops(self) -> int:
        return self.elementwise * self.runs

    @property
    def n_parameters(self) -> int:
        return self.parameters * self.copies

    def moved(self, *, fused: bool) -> int:
        """Numbers read and written, in all runs."""
        inside = self.inside_reads + self.inside_writes if fused else 0
        return (self.weights + self.cache + self.reads + self.writes - inside) * self.runs

    def forward_bytes(self, dtype: Precision, *, fused: bool) -> tuple[int, int]:
        """Read and written in one run."""
        reads, writes = self._activations(fused=fused)
        size = dtype.wide if self.is_wide else dtype.narrow
        of_weights = dtype.wide if self.product is None else size
        return self.weights * of_weights + (self.cache + reads) * size, writes * size

    def backward_bytes(self, dtype: Precision, *, fused: bool) -> tuple[int, int]:
        """What was read and what comes back are read (by a product twice), gradients of all that was read written.

        A fused kernel reads its result too, for the sum that softmax's gradient needs.
        """
        reads, writes = self._activations(fused=fused)
        size = dtype.wide if self.is_wide else dtype.narrow
        of_weights = 0 if self.product is None else size
        times = 1 if self.product is None else 2
        return (
            self.weights * of_weights + (reads + times * writes) * size,
            reads * size + self.parameters * dtype.wide,
        )

    def cast_bytes(self, dtype: Precision) -> tuple[int, int]:
        """Mixed precision brings each product's weight to 16 bits, once a pass: read and written for one copy."""
        if dtype is not Precision.MIXED or self.product is None or self.is_wide:
            return 0, 0
        return self.weights * dtype.wide, self.weights * dtype.narrow

    def _activations(self, *, fused: bool) -> tuple[int, int]:
        if not fused:
            return self.reads, self.writes
        return self.reads - self.inside_reads, self.writes - self.inside_writes

    @property
    def is_block(self) -> bool:
        """Part of a Transformer's block: what activation checkpointing computes again."""
        return "blocks" in self.part.split(".")

    @property
    def is_attention_core(self) -> bool:
        """Scores, softmax and mix: what a fused kernel does in one."""
        return self.inside_reads + self.inside_writes > 0


def linear(
    part: str, name: str, *, rows: int, d_in: int, d_out: int, bias: bool, copies: int = 1, kept: Kept = NOTHING
) -> Operation:
    """Rows times a weight matrix."""
    return Operation(
        part=part,
        name=name,
        copies=copies,
        product=Product(rows=rows, inner=d_in, columns=d_out),
        elementwise=rows * d_out if bias else 0,
        parameters=d_in * d_out + (d_out if bias else 0),
        weights=d_in * d_out + (d_out if bias else 0),
        reads=rows * d_in,
        writes=rows * d_out,
        kept=kept,
    )


def table(
    part: str, name: str, *, rows: int, n_entries: int, width: int, parameters: int | None = None, add: bool = False
) -> Operation:
    """A look-up: each row reads one entry, `add` if it is added to what is there. No product, no FLOP of its own."""
    return Operation(
        part=part,
        name=name,
        elementwise=rows * width if add else 0,
        parameters=n_entries * width if parameters is None else parameters,
        weights=rows * width,
        reads=rows * width if add else 0,
        writes=rows * width,
        is_wide=True,
        kernels=2,  # look up, then add or scale
    )


def logits(part: str, *, rows: int, d_model: int, n_words: int, is_tied: bool, bias: bool) -> Operation:
    """The unembedding: a tied one reads a table that is counted elsewhere."""
    own_bias = n_words if bias else 0
    return Operation(
        part=part,
        name=LOGITS,
        product=Product(rows=rows, inner=d_model, columns=n_words),
        elementwise=rows * own_bias,
        parameters=own_bias + (0 if is_tied else n_words * d_model),
        weights=n_words * d_model + own_bias,
        reads=rows * d_model,
        writes=rows * n_words,
        kept=Kept(copies=rows * d_model),
    )


def loss(of: Operation) -> Operation:
    """Cross-entropy of those logits, always in float32; it keeps their log-probabilities."""
    return Operation(
        part=LOSS,
        name=of.part,
        elementwise=LOG_SOFTMAX * of.writes,
        reads=of.writes,
        writes=of.writes,
        is_wide=True,
        kernels=3,  # to float32, log-softmax, the targets' sum
        kept=Kept(flags=4 * of.writes),
    )


def over_steps(first: Operation, last: Operation, n: int) -> Operation:
    """`n` decoding steps as one operation, exactly: between first and last every size grows evenly."""
    if first == last:
        return replace(first, steps=first.steps * n, phase=Phase.DECODE)

    def total(one: int, other: int) -> int:
        return n * (one + other) // 2

    moved = ("elementwise", "weights", "cache", "reads", "writes", "inside_reads", "inside_writes")
    sums = {name: total(getattr(first, name), getattr(last, name)) for name in moved}
    product, visible = None, Fraction(1)
    if first.product is not None and last.product is not None:
        # One size of the product differs: the number of keys.
        sizes = {name: (getattr(first.product, name), getattr(last.product, name)) for name in ("inner", "columns")}
        grown = {name: pair[0] if pair[0] == pair[1] else total(*pair) for name, pair in sizes.items()}
        product = replace(first.product, **grown)
        useful = n * sum(one.visible * one.product.multiply_adds for one in (first, last) if one.product) / 2
        visible = Fraction(useful) / product.multiply_adds
    return replace(
        first, **sums, product=product, visible=visible, kernels=first.kernels * n, phase=Phase.DECODE
    )  # fmt: skip
