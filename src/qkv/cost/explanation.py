"""Explain a model's costs in words: attention crossover, decode intensity, and comparison with RNNs."""

from dataclasses import dataclass
from fractions import Fraction

from qkv.choices import CellKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost.operation import Operation
from qkv.cost.operations import attended_pairs, list_operations
from qkv.cost.workload import Mode, Workload

AnyTransformerConfig = GPTConfig | BERTConfig | Seq2SeqConfig


@dataclass(frozen=True, kw_only=True)
class AttentionCrossover:
    """The shortest sequence length at which scores and mix cost at least as much as the rest of a block."""

    executed: int
    """The crossover length if all query–key pairs are counted, including masked pairs."""
    useful: int | None
    """The crossover length if only unmasked pairs are counted, or None if attention never costs as much as the rest."""


def attention_crossover(config: AnyTransformerConfig) -> AttentionCrossover:
    """Find the crossover length for self-attention.

    In models with an encoder and a decoder, this is the crossover in the encoder.
    """
    # With a single token, the scores and mix cost as much as one pair, and the rest costs as much as one token.
    operations = list_operations(config.replace(sliding_window=None), Workload(batch_size=1, seq_len=1))
    block = [op for op in operations if op.is_block and not op.part.startswith("decoder.")]
    flops_per_pair = sum(op.flops for op in block if op.is_attention_core)
    flops_per_token = sum(op.flops for op in block) - flops_per_pair
    executed = max(1, -(-flops_per_token // flops_per_pair))
    is_causal = isinstance(config, GPTConfig) and config.causal

    def pairs_per_token(n: int) -> Fraction:
        return Fraction(attended_pairs(n, n, causal=is_causal, window=config.sliding_window), n)

    target = Fraction(flops_per_token, flops_per_pair)
    # pairs_per_token never decreases with n and never exceeds n, so a binary search finds the crossover. A sliding
    # window limits pairs_per_token, so the crossover may not exist.
    low, high = 1, 2 * executed + 1
    if config.sliding_window is not None:
        reach = config.sliding_window if is_causal else 2 * config.sliding_window - 1
        if reach <= target:
            return AttentionCrossover(executed=executed, useful=None)
        # Σ min(i, reach) ≥ n·reach − reach², which gives an upper limit for the search.
        high = max(high, -(-reach * reach // (reach - target)) + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pairs_per_token(middle) >= target else (middle + 1, high)
    return AttentionCrossover(executed=executed, useful=low)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one layer of width `d` for `n` tokens."""

    name: str
    flops: int
    formula: str
    sequential_steps: int
    """Number of sequential matmuls, each of which depends on the previous one."""
    parameters: int


def compare_attention_with_rnn_costs(n: int, d: int, *, batch_size: int = 1) -> list[LayerCost]:
    """Compare the costs of self-attention and RNN layers as in lecture E.

    Self-attention takes n²d operations in O(1) steps, and an RNN layer takes nd² operations in O(n) steps.
    """
    b = batch_size
    costs = [
        LayerCost(
            name="self-attention, scores and mix",
            flops=4 * b * n * n * d,
            formula="4bn²d",
            sequential_steps=1,
            parameters=0,
        ),
        LayerCost(
            name="self-attention, with Q K V O",
            flops=8 * b * n * d * d + 4 * b * n * n * d,
            formula="8bnd² + 4bn²d",
            sequential_steps=1,
            parameters=4 * d * d,
        ),
    ]
    for name, gates in (("RNN", 1), (CellKind.GRU.value.upper(), 3), (CellKind.LSTM.value.upper(), 4)):
        costs.append(
            LayerCost(
                name=name,
                flops=4 * gates * b * n * d * d,
                formula=f"{4 * gates}bnd²",
                sequential_steps=n,
                parameters=gates * (2 * d * d + 2 * d),
            )
        )
    return costs


def explain_crossover_intensity_or_recurrence(config: ModelConfig, workload: Workload) -> list[str]:
    """Explain the costs of this model and workload in a list of sentences."""
    if isinstance(config, RNNConfig):
        steps = f"{workload.n_source:,} encoder steps, then {workload.final_seq_len:,} decoder steps"
        return [f"The steps of an RNN are sequential: {steps}. Self-attention takes 1 step per layer."]
    sentences = [_describe_crossover(config)]
    if workload.mode is Mode.DECODE:
        sentences.append(_describe_decode_intensity(config, workload))
    return sentences


def _describe_crossover(config: AnyTransformerConfig) -> str:
    crossover = attention_crossover(config)
    executed = _format_length(crossover.executed, config.d_model)
    sentence = f"Scores and mix (n²) cost more than the rest of a block beyond {executed}"
    if crossover.useful == crossover.executed:
        return f"{sentence}."
    if crossover.useful is None:
        return (
            f"{sentence}. If only pairs inside sliding_window={config.sliding_window} are counted, scores and mix "
            "never cost more."
        )
    return (
        f"{sentence}. If only unmasked pairs are counted, the threshold is "
        f"{_format_length(crossover.useful, config.d_model)}."
    )


def _format_length(n: int, d_model: int) -> str:
    return f"{n:,} tokens ({n / d_model:.3g} × d_model)"


def _describe_decode_intensity(config: AnyTransformerConfig, workload: Workload) -> str:
    """Describe how many FLOPs a decode step performs per byte of weights and cache in the blocks.

    With a batch size of 1, 16 bits and h_kv = h, the ratio is exactly 1. As the batch size grows, the weights matter
    less, and the ratio approaches the value for the cache only.
    """
    blocks = [op for op in list_operations(config, workload) if op.is_block and op.matmul is not None]
    flops = sum(op.flops for op in blocks)
    ratio = Fraction(flops, _weight_and_cache_bytes(blocks, workload))
    cache_bytes = sum(op.cache * op.runs for op in blocks if op.cache) * workload.dtype.matmul_itemsize
    limit = Fraction(flops, cache_bytes)
    return (
        f"In the blocks, a decode step performs {float(ratio):.4g} FLOPs per byte of weights and cache. As the batch "
        f"size grows, this ratio approaches {float(limit):.4g}."
    )


def _weight_and_cache_bytes(operations: list[Operation], workload: Workload) -> int:
    return sum((op.weights + op.cache) * op.runs for op in operations) * workload.dtype.matmul_itemsize
