"""Plot cost estimates: roofline, FLOPs by sequence length, cache size, and RNN compared with attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qkv.config import BERTConfig, RNNConfig
from qkv.cost import Estimate, Precision, Workload, cache_bytes, list_operations
from qkv.cost.devices import DeviceSpec
from qkv.cost.explanation import attention_crossover, compare_layer_costs
from qkv.cost.operation import LOSS
from qkv.cost.roofline import RooflineBound, roofline_bound
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#08519c", "#d95f02", "#1b7837", "0.4"
POINT_COLORS = ("#d95f02", "#08519c", "#1b7837", "#7b3294", "#a6761d", "#e7298a")
"""Colors of the slowest operations. All other points are gray."""
OPERATION_GROUPS = {
    "q_proj": "Q K V O",
    "k_proj": "Q K V O",
    "v_proj": "Q K V O",
    "out_proj": "Q K V O",
    "up_proj": "feed-forward",
    "gate_proj": "feed-forward",
    "down_proj": "feed-forward",
    "norm": "norms",
    "add": "adds",
}
"""Operations that share one point."""


def plot_cost(estimate: Estimate, device: DeviceSpec) -> "Figure":
    """Plot a four-panel figure of one model and one workload."""
    figure = new_figure(width=12.0, height=9.0)
    roofline, against_length, cache, recurrent = figure.subplots(2, 2).flatten()
    _plot_roofline(roofline, roofline_bound(estimate, device))
    _plot_flops_by_length(against_length, estimate)
    _plot_cache_size(cache, estimate)
    _plot_rnn_comparison(recurrent, estimate)
    figure.suptitle(f"{estimate.parameters.total:,} parameters · {estimate.title}")
    return figure


def _plot_roofline(axes: "Axes", roof: RooflineBound) -> None:
    peak, bandwidth = roof.device.peak(roof.work.dtype), roof.device.bandwidth
    dots = _roofline_points(roof)
    ridge = peak / bandwidth
    low = min(0.1, *(one.intensity for one in dots)) / 2
    high = max(20 * ridge, *(2 * one.intensity for one in dots))
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="0.2", linewidth=1.5)
    axes.axvline(ridge, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"{ridge:,.0f} FLOPs a byte",
        (ridge, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -12),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )
    total = sum(one.seconds for one in dots)
    for number, one in enumerate(dots):
        rate = min(peak, one.intensity * bandwidth)
        is_named = number < len(POINT_COLORS)
        axes.scatter(
            [one.intensity],
            [rate],
            s=20 + 500 * one.seconds / total,
            alpha=0.8,
            zorder=3,
            color=POINT_COLORS[number] if is_named else "0.6",
            edgecolor="white",
            linewidth=0.7,
            label=f"{one.name}, {one.seconds / total:.0%} of the time" if is_named else None,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low * bandwidth / 2, peak * 4))
    # Use one marker size in the legend, because the largest markers would enlarge it.
    for handle in axes.legend(frameon=False, loc="lower right", fontsize=8).legend_handles:
        handle.set_sizes([30])  # type: ignore[union-attr]
    _label_axes(axes, f"Roofline of the {roof.device.title}", "FLOPs per byte moved", "attainable FLOP/s")


@dataclass(frozen=True)
class _RooflinePoint:
    name: str
    intensity: float
    seconds: float


def _roofline_points(roof: RooflineBound) -> list[_RooflinePoint]:
    """Returns one point per group of operations, slowest first.

    Element-wise FLOPs are included, because operations with 0 FLOPs cannot be shown on a logarithmic axis.
    """
    kinds: dict[str, list[float]] = {}
    for one in roof.launches:
        name = "loss" if one.part == LOSS else OPERATION_GROUPS.get(one.name, one.name)
        sums = kinds.setdefault(name, [0.0, 0.0, 0.0])
        for i, value in enumerate((one.flops + one.elementwise_flops, one.n_bytes, roof.of(one))):
            sums[i] += value
    dots = [
        _RooflinePoint(name, flops / moved, seconds)
        for name, (flops, moved, seconds) in kinds.items()
        if flops and moved
    ]
    return sorted(dots, key=lambda dot: -dot.seconds)


def _plot_flops_by_length(axes: "Axes", estimate: Estimate) -> None:
    config = estimate.config
    if isinstance(config, RNNConfig):
        lengths = [2**i for i in range(3, 13)]
        longest = config.replace(context_length=max(lengths))
        costs = [sum(one.flops for one in list_operations(longest, Workload(batch=1, seq_len=n))) for n in lengths]
        axes.plot(lengths, costs, color=BLUE, marker="o", markersize=3)
    else:
        found = attention_crossover(config)
        end = 16 * max(found.executed, 16)
        lengths = [max(1, int(end * 2 ** (-i / 2))) for i in range(24, -1, -1)]
        longest = config.replace(context_length=end)
        core, rest = [], []
        for n in lengths:
            made = list_operations(longest, Workload(batch=1, seq_len=n))
            block = [one for one in made if one.is_block and not one.part.startswith("decoder.")]
            core.append(sum(one.flops for one in block if one.is_attention_core))
            rest.append(sum(one.flops for one in block) - core[-1])
        axes.plot(lengths, rest, color=BLUE, label="matmuls with weights, ∝ n")
        axes.plot(lengths, core, color=ORANGE, label="attention scores and weighted sum, ∝ n²")
        axes.axvline(found.executed, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"n = {found.executed:,} = {found.executed / config.d_model:.3g}d",
            (found.executed, min(core)),
            rotation=90,
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=GREY,
        )
        axes.legend(frameon=False, loc="upper left")
    axes.set(xscale="log", yscale="log")
    what = {"rnn": "entire model", "seq2seq": "encoder blocks"}
    _label_axes(
        axes, f"A pass against its length: {what.get(config.family, 'the blocks')}", "tokens n", "FLOPs per sequence"
    )


def _plot_cache_size(axes: "Axes", estimate: Estimate) -> None:
    config, work = estimate.config, estimate.work
    if isinstance(config, BERTConfig):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "BERT has no KV cache", ha="center", va="center")
        return
    lengths = [2**i for i in range(6, 18)]
    dtype = Precision.FLOAT32 if work.dtype is Precision.FLOAT32 else Precision.BFLOAT16
    weights = estimate.parameters.total * dtype.matmul_itemsize
    for batch, colour in ((1, BLUE), (8, ORANGE), (64, GREEN)):
        sizes = [cache_bytes(config, batch=batch, length=n, dtype=dtype) / 2**30 for n in lengths]
        axes.plot(lengths, sizes, color=colour, marker="o", markersize=3, label=f"batch {batch}")
    axes.axhline(weights / 2**30, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "the weights", (lengths[-1], weights / 2**30), xytext=(0, 3), textcoords="offset points", ha="right", color=GREY
    )
    axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False, loc="lower right")
    _label_axes(axes, f"KV cache size by context length, {dtype.value}", "cached tokens", "GiB")


def _plot_rnn_comparison(axes: "Axes", estimate: Estimate) -> None:
    """Compare the layers as in lecture E: n²d in one step for attention, nd² in n steps for an RNN."""
    d = estimate.config.d_model
    lengths = [2**i for i in range(3, 17)]
    compared = [compare_layer_costs(n, d) for n in lengths]
    names = [one.name for one in compared[0]]
    colours = (ORANGE, "#b35806", "#9ecae1", BLUE, "#023858")
    for i, name in enumerate(names):
        steps = "1 step" if compared[-1][i].sequential_steps == 1 else "n steps"
        axes.plot(lengths, [row[i].flops for row in compared], color=colours[i % 5], label=f"{name} ({steps})")
    axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _label_axes(axes, f"RNN compared with self-attention, one layer of width {d:,}", "tokens n", "FLOPs per sequence")


def _label_axes(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
