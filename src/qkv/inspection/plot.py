"""Plot any view as a matplotlib figure: `plot_view(view).savefig("x.pdf")`."""

from collections.abc import Callable, Sequence
from math import ceil
from textwrap import fill, shorten
from typing import TYPE_CHECKING

from qkv.inspection.attention_map import AttentionMapView
from qkv.inspection.charts import (
    plot_coreference,
    plot_embedding_paths,
    plot_intervention_effect,
    plot_logit_attribution,
    plot_neuron_view,
)
from qkv.inspection.coreference import CoreferenceView
from qkv.inspection.embeddings import EmbeddingView
from qkv.inspection.figures import TITLE_LINE_INCHES, Heatmap, new_figure, plot_heatmaps, wrap_title
from qkv.inspection.heads import PATTERNS, HeadsView
from qkv.inspection.interventions import InterventionEffect
from qkv.inspection.logit_attribution import LogitAttribution
from qkv.inspection.logit_lens import LogitLensView
from qkv.inspection.neuron_view import NeuronView
from qkv.inspection.residual_stream import ResidualStreamView
from qkv.inspection.timeline import TrainingTimelineView
from qkv.inspection.word_map import COLORS_AND_MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

View = (
    HeadsView
    | AttentionMapView
    | NeuronView
    | ResidualStreamView
    | LogitLensView
    | CoreferenceView
    | EmbeddingView
    | TrainingTimelineView
    | LogitAttribution
    | InterventionEffect
)

MAX_COLUMNS = 20
"""The maximum number of token columns in a plot."""
MAX_TITLE_CHARS = 170
"""The maximum number of characters in a title. Longer titles are truncated."""


def plot_view(view: View, *, title: str = "", changes: Sequence[str] = ()) -> "Figure":
    """Plot a view.

    `title` is shown above the view's own title. `changes` contains a description of each intervention, which are shown
    on separate lines.
    """
    title = _join_lines(*(fill(shorten(line, MAX_TITLE_CHARS, placeholder=" …"), 90) for line in (title, *changes)))
    match view:
        case HeadsView():
            figure = _plot_heads(view, title)
        case AttentionMapView():
            figure = _plot_attention_map(view, title)
        case ResidualStreamView():
            figure = _plot_residual_norms(view, title)
        case LogitLensView():
            figure = _plot_logit_lens(view, title)
        case TrainingTimelineView():
            figure = _plot_timeline(view, title)
        case NeuronView():
            figure = plot_neuron_view(view, title)
        case CoreferenceView():
            figure = plot_coreference(view, title or fill(view.text, 90))
        case EmbeddingView():
            figure = plot_embedding_paths(view, title)
        case LogitAttribution():
            figure = plot_logit_attribution(view, title)
        case InterventionEffect():
            figure = plot_intervention_effect(view, title)
    return figure


def _plot_heads(view: HeadsView, title: str) -> "Figure":
    """Plot a grid of attention maps, with one row per layer and one column per head.

    The title of each map is the head's pattern. Token labels are shown on the left and at the bottom if they are
    legible.
    """
    n_layers, n_heads, n, m = view.weights.shape
    cell_width = max(1.25, min(2.4, 0.085 * m, 16 / n_heads))
    cell_height = cell_width * min(2.0, max(0.5, n / m))
    figure = new_figure(width=1.3 + cell_width * n_heads, height=1.4 + (0.25 + cell_height) * n_layers)
    axes = figure.subplots(n_layers, n_heads, squeeze=False)
    for layer, row in enumerate(axes):
        for head, axis in enumerate(row):
            # Take the square root to make small weights visible in this overview.
            axis.imshow(view.weights[layer, head].sqrt().cpu().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
            axis.set(xticks=[], yticks=[])
            pattern = view.labels[layer][head]
            best = (
                "" if pattern is None else f"{pattern} {float(view.scores[layer, head, PATTERNS.index(pattern)]):.2f}"
            )
            axis.set_title(best, fontsize=6.5, pad=2)
            if head == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
                _set_token_ticks_if_legible(axis.set_yticks, view.queries, inches_per_label=cell_height / n)
            if layer == n_layers - 1:
                axis.set_xlabel(f"head {head}", fontsize=8)
                _set_token_ticks_if_legible(axis.set_xticks, view.keys, inches_per_label=cell_width / m, rotation=90)
    subtitle = wrap_title(
        _join_lines(title, f"{view.stack}: queries as rows, keys as columns, color is √weight"), figure.get_figwidth()
    )
    figure.set_figheight(figure.get_figheight() + TITLE_LINE_INCHES * max(0, subtitle.count("\n") - 1))
    figure.suptitle(subtitle, fontsize="medium")
    return figure


def _set_token_ticks_if_legible(
    ticks: Callable[..., object], labels: list[str], *, inches_per_label: float, rotation: int = 0
) -> None:
    """Set token labels if each label has enough space. Labels smaller than 4 points would not be legible."""
    size = min(6.5, 0.85 * 72 * inches_per_label)
    if size >= 4:
        ticks(range(len(labels)), labels, fontsize=size, rotation=rotation)


def _plot_attention_map(view: AttentionMapView, title: str) -> "Figure":
    return plot_heatmaps(
        Heatmap(
            matrix=view.weights,
            rows=view.queries,
            columns=view.keys,
            title=view.title,
            row_axis="query" + (" (each row sums to 1)" if view.is_share else ""),
            column_axis="key",
        ),
        title=title,
    )


def _plot_residual_norms(view: ResidualStreamView, title: str) -> "Figure":
    layers = [f"layer {layer}" for layer in range(view.sublayer_norms.shape[1])]
    maps = [
        Heatmap(
            matrix=view.residual_norms.flip(0),
            rows=view.depths[::-1],
            columns=view.positions,
            title="residual stream",
            row_axis="",
            column_axis="",
        )
    ]
    maps += [
        Heatmap(
            matrix=rows.flip(0),
            rows=layers[::-1],
            columns=view.positions,
            title=f"output of {part}",
            row_axis="",
            column_axis="",
        )
        for part, rows in zip(view.sublayers, view.sublayer_norms, strict=True)
    ]
    heads = [f"head {head}" for head in range(view.head_norms.shape[1])]
    maps.append(
        Heatmap(
            matrix=view.head_norms.mean(-1).flip(0),
            rows=layers[::-1],
            columns=heads,
            title="norm of each self-attention head's output\n(mean over all tokens)",
            row_axis="",
            column_axis="",
        )
    )
    per_row = 1 if len(view.positions) > 24 else 2
    return plot_heatmaps(*maps, title=_join_lines(title, f"{view.stack}: vector norms"), per_row=per_row)


def _plot_logit_lens(view: LogitLensView, title: str) -> "Figure":
    """Plot the top prediction at each layer and position, with the deepest layer at the top.

    The color indicates the probability of the prediction, and the top axis shows the actual tokens.
    """
    n = len(view.positions)
    columns = range(max(0, n - MAX_COLUMNS), n)
    n_depths = len(view.depths)
    figure = new_figure(width=1.8 + 0.8 * len(columns), height=1.9 + 0.36 * n_depths)
    axis = figure.subplots()
    best = view.probabilities[:, columns, 0].flip(0).float().cpu()
    image = axis.imshow(best.numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row in range(n_depths):
        for column, position in enumerate(columns):
            token = view.tokens[n_depths - 1 - row][position][0]
            text_color = "black" if float(best[row, column]) > 0.55 else "white"
            axis.text(column, row, _truncate_token(token), ha="center", va="center", fontsize=7, color=text_color)
    axis.set_yticks(range(n_depths), view.depths[::-1], fontsize=8)
    axis.set_xticks(range(len(columns)), [_truncate_token(view.positions[i]) for i in columns], fontsize=8)
    axis.set_xlabel("input token")
    target_axis = axis.secondary_xaxis("top")
    target_axis.set_xticks(range(len(columns)), [_truncate_token(view.targets[i] or "?") for i in columns], fontsize=8)
    target_axis.set_xlabel("actual next token" if view.predicts_next else "actual token")
    figure.colorbar(image, ax=axis, fraction=0.03, pad=0.01, label="probability of the prediction")
    note = f"last {len(columns)} of {n} tokens" if len(columns) < n else ""
    figure.suptitle(_join_lines(title, note), fontsize="medium")
    return figure


def _plot_timeline(view: TrainingTimelineView, title: str) -> "Figure":
    """Plot the best head's score for each pattern and the probability of the actual tokens at each depth by step."""
    n_panels = 1 if view.target_probabilities is None else 2
    figure = new_figure(width=8.0, height=3.6 * n_panels)
    axes = figure.subplots(n_panels, 1, squeeze=False)[:, 0]
    best = view.scores.flatten(1, 2).amax(1).T.tolist()
    for pattern, values, (color, marker) in zip(PATTERNS, best, COLORS_AND_MARKERS, strict=True):
        axes[0].plot(view.steps, values, color=color, marker=marker, markersize=4, label=pattern)
    axes[0].set(xlabel="step", ylabel="score of the best head", ylim=(-0.02, 1.02))
    axes[0].legend(frameon=False, fontsize="small", ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[0].spines[["top", "right"]].set_visible(False)
    if view.target_probabilities is not None:
        _plot_target_probability_over_training(axes[1], view)
    figure.suptitle(title, fontsize="medium")
    return figure


def _plot_target_probability_over_training(axis: "Axes", view: TrainingTimelineView) -> None:
    assert view.target_probabilities is not None
    by_depth = view.target_probabilities.nanmean(-1).T.flip(0)
    image = axis.imshow(by_depth.cpu().numpy(), cmap="viridis", vmin=0, aspect="auto")
    ticks = range(0, len(view.steps), ceil(len(view.steps) / 12))
    axis.set_xticks(ticks, [f"{view.steps[i]:,}" for i in ticks])
    axis.set_yticks(range(len(view.depths)), view.depths[::-1], fontsize=8)
    axis.set(xlabel="step")
    axis.figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, label="mean probability of the actual token")


def _truncate_token(token: str) -> str:
    return token if len(token) <= 9 else f"{token[:8]}…"


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
