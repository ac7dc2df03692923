"""Where attention overtakes the rest, what decoding is bound by, and how an RNN compares: exact, and in words."""

from dataclasses import dataclass
from fractions import Fraction

from qkv.choices import CellKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.blocks import seen_pairs
from qkv.cost.operation import Operation
from qkv.cost.operations import operations
from qkv.cost.workload import Mode, Workload

Transformer = GPTConfig | BERTConfig | Seq2SeqConfig


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The shortest text at which scores and mix cost at least as much as the rest of a block."""

    executed: int
    """By an unmasked kernel."""
    useful: int | None
    """Counting what the mask lets look alone; None: they never do."""


def crossing(config: Transformer) -> Crossing:
    """Of a block's self-attention; an encoder–decoder's is its encoder's."""
    # At one token the core costs what it costs a pair, everything else what it costs a token.
    once = operations(config.replace(sliding_window=None), Workload(batch=1, length=1))
    block = [one for one in once if one.is_block and not one.part.startswith("decoder.")]
    a_pair = sum(one.flops for one in block if one.is_attention_core)
    a_token = sum(one.flops for one in block) - a_pair
    executed = max(1, -(-a_token // a_pair))
    is_causal = isinstance(config, GPTConfig) and config.causal

    def pairs_a_token(n: int) -> Fraction:
        return Fraction(seen_pairs(n, n, causal=is_causal, window=config.sliding_window), n)

    wanted = Fraction(a_token, a_pair)
    # Seen pairs a token never fall with n, and never pass n: the answer lies between, or a window keeps it away.
    low, high = 1, 2 * executed + 1
    if config.sliding_window is not None:
        reach = config.sliding_window if is_causal else 2 * config.sliding_window - 1
        if reach <= wanted:
            return Crossing(executed=executed, useful=None)
        # Σ min(i, reach) is at least n·reach − reach², so that long a text is enough.
        high = max(high, -(-reach * reach // (reach - wanted)) + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pairs_a_token(middle) >= wanted else (middle + 1, high)
    return Crossing(executed=executed, useful=low)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer on `n` tokens of width `d`."""

    name: str
    flops: int
    formula: str
    sequential_steps: int
    """Products that must wait for one another, each for a token's sake."""
    parameters: int


def layers_compared(n: int, d: int, *, batch: int = 1) -> list[LayerCost]:
    """Lecture E's comparison: n²d in O(1) steps against nd² in O(n) steps, with the numbers in front."""
    b = batch
    rows = [
        LayerCost(
            name="self-attention, scores and mix", flops=4 * b * n * n * d, formula="4bn²d", sequential_steps=1,
            parameters=0,
        ),
        LayerCost(
            name="self-attention, with Q K V O", flops=8 * b * n * d * d + 4 * b * n * n * d, formula="8bnd² + 4bn²d",
            sequential_steps=1, parameters=4 * d * d,
        ),
    ]  # fmt: skip
    for name, gates in (("RNN", 1), (CellKind.GRU.value.upper(), 3), (CellKind.LSTM.value.upper(), 4)):
        rows.append(
            LayerCost(
                name=name, flops=4 * gates * b * n * d * d, formula=f"{4 * gates}bnd²", sequential_steps=n,
                parameters=gates * (2 * d * d + 2 * d),
            )
        )  # fmt: skip
    return rows


def words(config: ModelConfig, work: Workload) -> list[str]:
    """What the numbers mean, for this model and this work."""
    if isinstance(config, RNNConfig):
        steps = f"{work.n_source:,} steps of the encoder, then {work.last_length:,} of the decoder"
        return [f"A recurrence waits for itself: {steps}, one after another; self-attention has 1 a layer."]
    return [_crossing_words(config), *(_decode_words(config, work) if work.mode is Mode.DECODE else [])]


def _crossing_words(config: Transformer) -> str:
    found = crossing(config)
    said = f"Past {_in_widths(found.executed, config.d_model)}, scores and mix (n²) cost more than the rest of a block"
    if found.useful == found.executed:
        return f"{said}."
    if found.useful is None:
        return f"{said}; if only pairs inside sliding_window={config.sliding_window} are counted, they never do."
    return f"{said}; if only pairs that the mask shows are counted, past {_in_widths(found.useful, config.d_model)}."


def _in_widths(n: int, d: int) -> str:
    """Rounded: one token more or less is no news."""
    return f"{n:,} tokens ({n / d:.3g} × the width)"


def _decode_words(config: Transformer, work: Workload) -> list[str]:
    """FLOPs a byte of weights and cache, in the blocks: with one row and 16 bits exactly 1 where h_kv = h."""
    blocks = [one for one in operations(config, work) if one.is_block and one.product is not None]
    ratio = Fraction(sum(one.flops for one in blocks), _read(blocks, work))
    of_cache = [one for one in blocks if one.cache]
    limit = Fraction(
        sum(one.flops for one in blocks), sum(one.cache * one.runs for one in of_cache) * work.dtype.narrow
    )
    does = f"In the blocks a decoding step does {float(ratio):.4g} FLOPs a byte of weights and cache"
    return [f"{does}; with ever more rows that tends to {float(limit):.4g}."]


def _read(made: list[Operation], work: Workload) -> int:
    return sum((one.weights + one.cache) * one.runs for one in made) * work.dtype.narrow
