"""Bar, scatter and line charts of views."""

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
"""Maximum number of characters, about three lines."""


def plot_neuron_view(view: NeuronView, title: str) -> "Figure":
    """Plot the query vector, its elementwise products with each key, and the resulting scores and weights."""
    shown = _top_keys(view)
    n, width = len(shown), view.products.shape[1]
    drawn = new_figure(width=4.5 + 0.11 * width + 3.2, height=2.4 + 0.24 * n)
    axes = drawn.subplots(2, 3, height_ratios=[1, max(2.0, 0.6 * n)], width_ratios=[4 + 0.11 * width, 1.6, 1.6])
    limit = float(view.q.abs().max()) or 1.0
    axes[0, 0].imshow(view.q[None].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes[0, 0].set(yticks=[0], xticks=[])
    axes[0, 0].set_yticklabels([f"q of {view.query_label}"])
    limit = float(view.products.abs().max()) or 1.0
    image = axes[1, 0].imshow(view.products[shown].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes[1, 0].set_yticks(range(n), [view.keys[i] for i in shown], fontsize=8)
    axes[1, 0].set_xlabel(f"q·k in each of the {width} dimensions (red: positive, blue: negative)")
    drawn.colorbar(image, ax=axes[1, 0], orientation="horizontal", fraction=0.05, pad=0.02)
    is_seen = view.scores[shown].isfinite().tolist()
    for axis, values, name in ((axes[1, 1], view.scaled, "score"), (axes[1, 2], view.weights, "weight")):
        colours = [BLUE if seen else "0.85" for seen in is_seen]
        axis.barh(range(n), values[shown].tolist(), color=colours)
        axis.set(ylim=(n - 0.5, -0.5), yticks=[], xlabel=name)
        axis.axvline(0, color="0.7", linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[1, 1].set_title("Σ ÷ √d", fontsize="small")
    axes[1, 2].set_title("softmax", fontsize="small")
    for axis in axes[0, 1:]:
        axis.set_axis_off()
    grey = "; gray: masked" if not all(is_seen) else ""
    if n < len(view.keys):
        grey += f"; top {n} of {len(view.keys)} keys by weight"
    said = f"{view.stack}, layer {view.layer}, head {view.head}: attention weights of {view.query_label}{grey}"
    drawn.suptitle(f"{title}\n{said}" if title else said, fontsize="medium")
    return drawn


def _top_keys(view: NeuronView) -> list[int]:
    """Returns the indices of the keys with the largest weights, at most `MAX_KEYS`, in text order."""
    return sorted(view.weights.topk(min(MAX_KEYS, len(view.keys))).indices.tolist())


def plot_coreference(view: CoreferenceView, title: str) -> "Figure":
    drawn = new_figure(width=9.0, height=2.2 + 0.5 * len(view.candidates))
    columns = view.columns
    axes = drawn.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, (name, values) in zip(axes, columns.items(), strict=True):
        said = view.says[name]
        colours = [ORANGE if word == said else "0.7" for word in view.candidates]
        bars = axis.barh(range(len(values)), values, color=colours)
        axis.bar_label(bars, fmt="%.2f" if name != "knock-out" else "%+.2f", fontsize=7, padding=2)
        axis.set_title(name, fontsize="medium")
        unit = (
            "change of log p (nats)\nnegative: the attention was needed"
            if name == "knock-out"
            else f"share of {view.pronoun!r}"
        )
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.3)
        axis.axvline(0, color="0.5", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(view.candidates)), view.candidates)
    axes[0].invert_yaxis()
    drawn.suptitle(f"{title}\nWhat does {view.pronoun!r} refer to?\n{_capitalize(view.verdict)}", fontsize="medium")
    drawn.supxlabel("Attention weights alone do not explain a prediction.", fontsize=7, color="0.4")
    return drawn


def plot_embedding_paths(view: EmbeddingView, title: str) -> "Figure":
    """Plot the path of each token from its embedding (hollow marker) to its final state (filled marker)."""
    drawn = new_figure(width=8.5, height=6.5)
    axis = drawn.subplots()
    n = len(view.tokens)
    points, tokens = view.points[:, -MAX_PATHS:], view.tokens[-MAX_PATHS:]
    colours = [COLORS_AND_MARKERS[place % len(COLORS_AND_MARKERS)][0] for place in range(len(tokens))]
    for place, colour in enumerate(colours):
        path = points[:, place].numpy()
        axis.plot(path[:, 0], path[:, 1], color=colour, linewidth=0.7, alpha=0.55, zorder=1)
        axis.scatter(*path[0], s=16, facecolors="white", edgecolors=colour, zorder=2)
        axis.scatter(*path[-1], s=22, color=colour, zorder=3)
    axis.margins(0.1)
    label_points(axis, points[-1], tokens, colours)
    axis.set_xlabel(f"PC 1: {view.explained_variance[0]:.0%} of the variance")
    axis.set_ylabel(f"second direction: {view.explained_variance[1]:.0%}")
    axis.spines[["top", "right"]].set_visible(False)
    way = "hollow: embedding; line: layers; filled: final state" if len(view.depths) > 1 else view.depths[0]
    way = f"last {len(tokens)} of {n} tokens; {way}" if len(tokens) < n else way
    axis.set_title(f"{title}\n{way}" if title else way, fontsize="medium")
    return drawn


def plot_logit_attribution(view: LogitAttribution, title: str) -> "Figure":
    """Plot the largest contributions to a logit. The others are summed into one bar."""
    order = view.values.abs().argsort(descending=True)[:MAX_BARS].tolist()
    names, values = [view.names[i] for i in order], [float(view.values[i]) for i in order]
    if len(order) < len(view.names):
        names.append(f"{len(view.names) - len(order)} others")
        values.append(float(view.values.sum()) - sum(values))
    drawn = new_figure(width=7.0, height=1.4 + 0.24 * len(names))
    axis = drawn.subplots()
    bars = axis.barh(range(len(names)), values, color=[BLUE if value > 0 else ORANGE for value in values])
    axis.bar_label(bars, fmt="%+.2f", fontsize=7, padding=2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    _style_axis(axis, f"contribution to the logit of {view.label} (total: {view.logit:.2f})")
    axis.set_title(title, fontsize="medium")
    return drawn


def plot_effect(view: InterventionEffect, title: str) -> "Figure":
    drawn = new_figure(width=9.0, height=max(3.0, 1.4 + 0.3 * len(view.ids)))
    guesses, moved = drawn.subplots(1, 2)
    rows = range(len(view.ids))
    guesses.barh([row - 0.2 for row in rows], view.before.exp().tolist(), height=0.38, color="0.7", label="before")
    guesses.barh([row + 0.2 for row in rows], view.after.exp().tolist(), height=0.38, color=ORANGE, label="after")
    guesses.set_yticks(rows, view.tokens, fontsize=8)
    guesses.invert_yaxis()
    guesses.legend(frameon=False, fontsize="small")
    _style_axis(guesses, f"p after {view.positions[view.position]!r}")
    moved.bar(range(len(view.positions)), view.divergence.tolist(), color=BLUE)
    step = -(-len(view.positions) // 30)
    ticks = range(0, len(view.positions), step)
    moved.set_xticks(ticks, [view.positions[i] for i in ticks], rotation=60, ha="right", fontsize=8)
    moved.set_ylabel("KL(before ‖ after), nats", fontsize=8)
    moved.spines[["top", "right"]].set_visible(False)
    changed = fill(shorten("; ".join(view.changes), MAX_CHANGE_CHARS, placeholder=" …"), 90)
    drawn.suptitle(f"{title}\n{changed}" if title else changed, fontsize="medium")
    return drawn


def _style_axis(axis: "Axes", name: str) -> None:
    axis.set_xlabel(name, fontsize=8)
    axis.axvline(0, color="0.5", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
