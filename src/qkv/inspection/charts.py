"""Plot views as bar, scatter and line charts."""

from textwrap import fill, shorten
from typing import TYPE_CHECKING

from qkv.inspection.coreference import CoreferenceView
from qkv.inspection.embeddings import EmbeddingView
from qkv.inspection.figures import new_figure
from qkv.inspection.interventions import InterventionEffect
from qkv.inspection.logit_attribution import LogitAttribution
from qkv.inspection.neuron_view import NeuronView
from qkv.inspection.word_map import COLORS_AND_MARKERS, label_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#D55E00"
MAX_BARS = 24
MAX_PATHS = 24
MAX_KEYS = 40
MAX_CHANGE_CHARS = 270
"""The maximum number of characters in the description of the interventions, which is about three lines."""


def plot_neuron_view(view: NeuronView, title: str) -> "Figure":
    """Plot the query vector, its elementwise products with each key, and the resulting scores and weights."""
    top_keys = _top_keys(view)
    n, width = len(top_keys), view.products.shape[1]
    figure = new_figure(width=4.5 + 0.11 * width + 3.2, height=2.4 + 0.24 * n)
    axes = figure.subplots(2, 3, height_ratios=[1, max(2.0, 0.6 * n)], width_ratios=[4 + 0.11 * width, 1.6, 1.6])
    limit = float(view.q.abs().max()) or 1.0
    axes[0, 0].imshow(view.q[None].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes[0, 0].set(yticks=[0], xticks=[])
    axes[0, 0].set_yticklabels([f"q of {view.query_label}"])
    limit = float(view.products.abs().max()) or 1.0
    image = axes[1, 0].imshow(
        view.products[top_keys].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto"
    )
    axes[1, 0].set_yticks(range(n), [view.keys[i] for i in top_keys], fontsize=8)
    axes[1, 0].set_xlabel(f"q·k in each of the {width} dimensions (red: positive, blue: negative)")
    figure.colorbar(image, ax=axes[1, 0], orientation="horizontal", fraction=0.05, pad=0.02)
    is_visible = view.scores[top_keys].isfinite().tolist()
    for axis, values, name in ((axes[1, 1], view.scaled, "score"), (axes[1, 2], view.weights, "weight")):
        colors = [BLUE if visible else "0.85" for visible in is_visible]
        axis.barh(range(n), values[top_keys].tolist(), color=colors)
        axis.set(ylim=(n - 0.5, -0.5), yticks=[], xlabel=name)
        axis.axvline(0, color="0.7", linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[1, 1].set_title("Σ ÷ √d", fontsize="small")
    axes[1, 2].set_title("softmax", fontsize="small")
    for axis in axes[0, 1:]:
        axis.set_axis_off()
    note = "; gray: masked" if not all(is_visible) else ""
    if n < len(view.keys):
        note += f"; top {n} of {len(view.keys)} keys by weight"
    subtitle = f"{view.stack}, layer {view.layer}, head {view.head}: attention weights of {view.query_label}{note}"
    figure.suptitle(f"{title}\n{subtitle}" if title else subtitle, fontsize="medium")
    return figure


def _top_keys(view: NeuronView) -> list[int]:
    """Return the indices of the (at most `MAX_KEYS`) keys with the largest weights, in text order."""
    return sorted(view.weights.topk(min(MAX_KEYS, len(view.keys))).indices.tolist())


def plot_coreference(view: CoreferenceView, title: str) -> "Figure":
    figure = new_figure(width=9.0, height=2.2 + 0.5 * len(view.candidates))
    columns = view.columns
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, (name, values) in zip(axes, columns.items(), strict=True):
        selected = view.selections[name]
        colors = [ORANGE if word == selected else "0.7" for word in view.candidates]
        bars = axis.barh(range(len(values)), values, color=colors)
        axis.bar_label(bars, fmt="%.2f" if name != "knock-out" else "%+.2f", fontsize=7, padding=2)
        axis.set_title(name, fontsize="medium")
        axis_label = (
            "change of log p (nats)\nnegative: the attention was needed"
            if name == "knock-out"
            else f"share of {view.pronoun!r}"
        )
        axis.set_xlabel(axis_label, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.3)
        axis.axvline(0, color="0.5", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(view.candidates)), view.candidates)
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}\nWhat does {view.pronoun!r} refer to?\n{_capitalize(view.verdict)}", fontsize="medium")
    figure.supxlabel("Attention weights by themselves do not explain a prediction.", fontsize=7, color="0.4")
    return figure


def plot_embedding_paths(view: EmbeddingView, title: str) -> "Figure":
    """Plot each token's path from its embedding (hollow marker) to its final state (filled marker)."""
    figure = new_figure(width=8.5, height=6.5)
    axis = figure.subplots()
    n = len(view.tokens)
    points, tokens = view.points[:, -MAX_PATHS:], view.tokens[-MAX_PATHS:]
    colors = [COLORS_AND_MARKERS[index % len(COLORS_AND_MARKERS)][0] for index in range(len(tokens))]
    for index, color in enumerate(colors):
        path = points[:, index].numpy()
        axis.plot(path[:, 0], path[:, 1], color=color, linewidth=0.7, alpha=0.55, zorder=1)
        axis.scatter(*path[0], s=16, facecolors="white", edgecolors=color, zorder=2)
        axis.scatter(*path[-1], s=22, color=color, zorder=3)
    axis.margins(0.1)
    label_points(axis, points[-1], tokens, colors)
    axis.set_xlabel(f"PC 1: {view.explained_variance[0]:.0%} of the variance")
    axis.set_ylabel(f"PC 2: {view.explained_variance[1]:.0%} of the variance")
    axis.spines[["top", "right"]].set_visible(False)
    caption = "hollow: embedding; line: layers; filled: final state" if len(view.depths) > 1 else view.depths[0]
    caption = f"last {len(tokens)} of {n} tokens; {caption}" if len(tokens) < n else caption
    axis.set_title(f"{title}\n{caption}" if title else caption, fontsize="medium")
    return figure


def plot_logit_attribution(view: LogitAttribution, title: str) -> "Figure":
    """Plot the largest contributions to a logit. All other contributions are summed into one bar."""
    order = view.values.abs().argsort(descending=True)[:MAX_BARS].tolist()
    names, values = [view.names[i] for i in order], [float(view.values[i]) for i in order]
    if len(order) < len(view.names):
        names.append(f"{len(view.names) - len(order)} others")
        values.append(float(view.values.sum()) - sum(values))
    figure = new_figure(width=7.0, height=1.4 + 0.24 * len(names))
    axis = figure.subplots()
    bars = axis.barh(range(len(names)), values, color=[BLUE if value > 0 else ORANGE for value in values])
    axis.bar_label(bars, fmt="%+.2f", fontsize=7, padding=2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    _style_axis(axis, f"contribution to the logit of {view.label} (total: {view.logit:.2f})")
    axis.set_title(title, fontsize="medium")
    return figure


def plot_intervention_effect(view: InterventionEffect, title: str) -> "Figure":
    figure = new_figure(width=9.0, height=max(3.0, 1.4 + 0.3 * len(view.ids)))
    prediction_axis, divergence_axis = figure.subplots(1, 2)
    rows = range(len(view.ids))
    prediction_axis.barh(
        [row - 0.2 for row in rows], view.log_probs_before.exp().tolist(), height=0.38, color="0.7", label="before"
    )
    prediction_axis.barh(
        [row + 0.2 for row in rows], view.log_probs_after.exp().tolist(), height=0.38, color=ORANGE, label="after"
    )
    prediction_axis.set_yticks(rows, view.tokens, fontsize=8)
    prediction_axis.invert_yaxis()
    prediction_axis.legend(frameon=False, fontsize="small")
    _style_axis(prediction_axis, f"p after {view.positions[view.position]!r}")
    divergence_axis.bar(range(len(view.positions)), view.divergence.tolist(), color=BLUE)
    step = -(-len(view.positions) // 30)
    ticks = range(0, len(view.positions), step)
    divergence_axis.set_xticks(ticks, [view.positions[i] for i in ticks], rotation=60, ha="right", fontsize=8)
    divergence_axis.set_ylabel("KL(before ‖ after), nats", fontsize=8)
    divergence_axis.spines[["top", "right"]].set_visible(False)
    changes_text = fill(shorten("; ".join(view.changes), MAX_CHANGE_CHARS, placeholder=" …"), 90)
    figure.suptitle(f"{title}\n{changes_text}" if title else changes_text, fontsize="medium")
    return figure


def _style_axis(axis: "Axes", name: str) -> None:
    axis.set_xlabel(name, fontsize=8)
    axis.axvline(0, color="0.5", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
