"""Plot cost estimates: the roofline, FLOPs by sequence length, the cache size, and RNNs compared with attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qkv.config import BERTConfig, RNNConfig
from qkv.cost import Estimate, Precision, Workload, cache_bytes, list_operations
from qkv.cost.devices import DeviceSpec, RooflineBound, roofline_bound
from qkv.cost.explanation import attention_crossover, compare_attention_with_rnn_costs
from qkv.cost.operation import LOSS
from qkv.inspection.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GRAY = "#08519c", "#d95f02", "#1b7837", "0.4"
POINT_COLORS = ("#d95f02", "#08519c", "#1b7837", "#7b3294", "#a6761d", "#e7298a")
"""The colors of the points for the slowest operations. All other points are gray."""
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
"""The groups of operations that share one point."""


def plot_cost_overview(estimate: Estimate, device: DeviceSpec) -> "Figure":
    """Plot the cost estimate for one model and one workload in a four-panel figure."""
    figure = new_figure(width=12.0, height=9.0)
    roofline, against_length, cache, recurrent = figure.subplots(2, 2).flatten()
    _plot_roofline(roofline, roofline_bound(estimate, device))
    _plot_flops_by_length(against_length, estimate)
    _plot_cache_size(cache, estimate)
    _plot_rnn_layer_comparison(recurrent, estimate)
    figure.suptitle(f"{estimate.parameters.total:,} parameters · {estimate.title}")
    return figure


def _plot_roofline(axes: "Axes", roofline: RooflineBound) -> None:
    peak, bandwidth = roofline.device.peak_flops(roofline.workload.dtype), roofline.device.bandwidth
    points = _roofline_points_by_group(roofline)
    ridge = peak / bandwidth
    low = min(0.1, *(point.intensity for point in points)) / 2
    high = max(20 * ridge, *(2 * point.intensity for point in points))
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="0.2", linewidth=1.5)
    axes.axvline(ridge, color=GRAY, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"{ridge:,.0f} FLOPs per byte",
        (ridge, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -12),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GRAY,
    )
    total = sum(point.seconds for point in points)
    for rank, point in enumerate(points):
        rate = min(peak, point.intensity * bandwidth)
        has_label = rank < len(POINT_COLORS)
        axes.scatter(
            [point.intensity],
            [rate],
            s=20 + 500 * point.seconds / total,
            alpha=0.8,
            zorder=3,
            color=POINT_COLORS[rank] if has_label else "0.6",
            edgecolor="white",
            linewidth=0.7,
            label=f"{point.name}, {point.seconds / total:.0%} of the time" if has_label else None,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low * bandwidth / 2, peak * 4))
    # Use the same marker size for all legend entries because the largest markers would enlarge the legend.
    for handle in axes.legend(frameon=False, loc="lower right", fontsize=8).legend_handles:
        handle.set_sizes([30])  # type: ignore[union-attr]
    _label_axes(axes, f"Roofline of the {roofline.device.title}", "FLOPs per byte moved", "attainable FLOP/s")


@dataclass(frozen=True)
class _RooflinePoint:
    name: str
    intensity: float
    seconds: float


def _roofline_points_by_group(roofline: RooflineBound) -> list[_RooflinePoint]:
    """Return one point per group of operations, slowest first.

    Element-wise FLOPs are included because operations with 0 FLOPs cannot be shown on a logarithmic axis.
    """
    kinds: dict[str, list[float]] = {}
    for launch in roofline.launches:
        name = "loss" if launch.part == LOSS else OPERATION_GROUPS.get(launch.name, launch.name)
        sums = kinds.setdefault(name, [0.0, 0.0, 0.0])
        for i, value in enumerate(
            (launch.flops + launch.elementwise_flops, launch.n_bytes, roofline.kernel_seconds(launch))
        ):
            sums[i] += value
    points = [
        _RooflinePoint(name, flops / n_bytes, seconds)
        for name, (flops, n_bytes, seconds) in kinds.items()
        if flops and n_bytes
    ]
    return sorted(points, key=lambda point: -point.seconds)


def _plot_flops_by_length(axes: "Axes", estimate: Estimate) -> None:
    config = estimate.config
    if isinstance(config, RNNConfig):
        lengths = [2**i for i in range(3, 13)]
        longest = config.replace(context_length=max(lengths))
        costs = [
            sum(operation.flops for operation in list_operations(longest, Workload(batch_size=1, seq_len=n)))
            for n in lengths
        ]
        axes.plot(lengths, costs, color=BLUE, marker="o", markersize=3)
    else:
        crossover = attention_crossover(config)
        end = 16 * max(crossover.executed, 16)
        lengths = [max(1, int(end * 2 ** (-i / 2))) for i in range(24, -1, -1)]
        longest = config.replace(context_length=end)
        core, rest = [], []
        for n in lengths:
            all_operations = list_operations(longest, Workload(batch_size=1, seq_len=n))
            block = [
                operation
                for operation in all_operations
                if operation.is_block and not operation.part.startswith("decoder.")
            ]
            core.append(sum(operation.flops for operation in block if operation.is_attention_core))
            rest.append(sum(operation.flops for operation in block) - core[-1])
        axes.plot(lengths, rest, color=BLUE, label="matmuls with weights, ∝ n")
        axes.plot(lengths, core, color=ORANGE, label="attention scores and weighted sum, ∝ n²")
        axes.axvline(crossover.executed, color=GRAY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"n = {crossover.executed:,} = {crossover.executed / config.d_model:.3g}d",
            (crossover.executed, min(core)),
            rotation=90,
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=GRAY,
        )
        axes.legend(frameon=False, loc="upper left")
    axes.set(xscale="log", yscale="log")
    scope = {"rnn": "entire model", "seq2seq": "encoder blocks"}
    _label_axes(
        axes, f"A pass against its length: {scope.get(config.family, 'the blocks')}", "tokens n", "FLOPs per sequence"
    )


def _plot_cache_size(axes: "Axes", estimate: Estimate) -> None:
    config, work = estimate.config, estimate.workload
    if isinstance(config, BERTConfig):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "BERT has no KV cache", ha="center", va="center")
        return
    lengths = [2**i for i in range(6, 18)]
    dtype = Precision.FLOAT32 if work.dtype is Precision.FLOAT32 else Precision.BFLOAT16
    weights = estimate.parameters.total * dtype.matmul_itemsize
    for batch, color in ((1, BLUE), (8, ORANGE), (64, GREEN)):
        sizes = [cache_bytes(config, batch_size=batch, seq_len=n, dtype=dtype) / 2**30 for n in lengths]
        axes.plot(lengths, sizes, color=color, marker="o", markersize=3, label=f"batch {batch}")
    axes.axhline(weights / 2**30, color=GRAY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "the weights", (lengths[-1], weights / 2**30), xytext=(0, 3), textcoords="offset points", ha="right", color=GRAY
    )
    axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False, loc="lower right")
    _label_axes(axes, f"KV cache size by context length, {dtype.value}", "cached tokens", "GiB")


def _plot_rnn_layer_comparison(axes: "Axes", estimate: Estimate) -> None:
    """Plot lecture E's comparison of layers: n²d in one step for attention, and nd² in n steps for an RNN."""
    d = estimate.config.d_model
    lengths = [2**i for i in range(3, 17)]
    compared = [compare_attention_with_rnn_costs(n, d) for n in lengths]
    names = [layer.name for layer in compared[0]]
    colors = (ORANGE, "#b35806", "#9ecae1", BLUE, "#023858")
    for i, name in enumerate(names):
        steps = "1 step" if compared[-1][i].sequential_steps == 1 else "n steps"
        axes.plot(lengths, [row[i].flops for row in compared], color=colors[i % 5], label=f"{name} ({steps})")
    axes.set(xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _label_axes(axes, f"RNN compared with self-attention, one layer of width {d:,}", "tokens n", "FLOPs per sequence")


def _label_axes(axes: "Axes", title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
