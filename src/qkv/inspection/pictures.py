"""Every view as a picture: `figure(view).savefig("x.pdf")`."""

from collections.abc import Callable, Sequence
from math import ceil
from textwrap import fill, shorten
from typing import TYPE_CHECKING

from qkv.inspection.charts import draw_contributions, draw_effect, draw_neuron, draw_paths, draw_reference
from qkv.inspection.contributions import Contributions
from qkv.inspection.embeddings import EmbeddingView
from qkv.inspection.figures import LINE, HeatMap, folded, heat_maps, new_figure
from qkv.inspection.heads import PATTERNS, HeadsView
from qkv.inspection.interventions import Effect
from qkv.inspection.lens import LensView
from qkv.inspection.maps import MapView
from qkv.inspection.neuron import NeuronView
from qkv.inspection.reference import ReferenceView
from qkv.inspection.stream import StreamView
from qkv.inspection.timeline import TimelineView
from qkv.inspection.word_map import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

View = (
    HeadsView | MapView | NeuronView | StreamView | LensView | ReferenceView | EmbeddingView | TimelineView
    | Contributions | Effect
)  # fmt: skip

MOST_POSITIONS = 20
"""Columns of words that a picture can hold."""
LONGEST_TITLE = 170
"""Characters; a longer text is shown as its beginning."""


def figure(view: View, *, title: str = "", changes: Sequence[str] = ()) -> "Figure":
    """`title`: above what the view says of itself, such as the text; `changes`: what was changed, a line for each."""
    title = _joined(*(fill(shorten(line, LONGEST_TITLE, placeholder=" …"), 90) for line in (title, *changes)))
    match view:
        case HeadsView():
            drawn = _heads(view, title)
        case MapView():
            drawn = _map(view, title)
        case StreamView():
            drawn = _stream(view, title)
        case LensView():
            drawn = _lens(view, title)
        case TimelineView():
            drawn = _timeline(view, title)
        case NeuronView():
            drawn = draw_neuron(view, title)
        case ReferenceView():
            drawn = draw_reference(view, title or fill(view.text, 90))
        case EmbeddingView():
            drawn = draw_paths(view, title)
        case Contributions():
            drawn = draw_contributions(view, title)
        case Effect():
            drawn = draw_effect(view, title)
    return drawn


def _heads(view: HeadsView, title: str) -> "Figure":
    """A row for each layer, a column for each head; the pattern that names a head stands above it.

    Tokens are named at the left and below, as far as they can be read.
    """
    n_layers, n_heads, n, m = view.weights.shape
    across = max(1.25, min(2.4, 0.085 * m, 16 / n_heads))
    high = across * min(2.0, max(0.5, n / m))
    drawn = new_figure(width=1.3 + across * n_heads, height=1.4 + (0.25 + high) * n_layers)
    axes = drawn.subplots(n_layers, n_heads, squeeze=False)
    for layer, row in enumerate(axes):
        for head, axis in enumerate(row):
            # The square root lets small weights be seen; the picture is an overview.
            axis.imshow(view.weights[layer, head].sqrt().cpu().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
            axis.set(xticks=[], yticks=[])
            pattern = view.labels[layer][head]
            best = (
                "" if pattern is None else f"{pattern} {float(view.scores[layer, head, PATTERNS.index(pattern)]):.2f}"
            )
            axis.set_title(best, fontsize=6.5, pad=2)
            if head == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
                _name_tokens(axis.set_yticks, view.queries, room=high / n)
            if layer == n_layers - 1:
                axis.set_xlabel(f"head {head}", fontsize=8)
                _name_tokens(axis.set_xticks, view.keys, room=across / m, rotation=90)
    said = folded(_joined(title, f"{view.stack}: rows look at columns; colour is √weight"), drawn.get_figwidth())
    drawn.set_figheight(drawn.get_figheight() + LINE * max(0, said.count("\n") - 1))
    drawn.suptitle(said, fontsize="medium")
    return drawn


def _name_tokens(ticks: Callable[..., object], names: list[str], *, room: float, rotation: int = 0) -> None:
    """`room`: inches for each; below 4 points nobody reads them."""
    size = min(6.5, 0.85 * 72 * room)
    if size >= 4:
        ticks(range(len(names)), names, fontsize=size, rotation=rotation)


def _map(view: MapView, title: str) -> "Figure":
    return heat_maps(
        HeatMap(
            matrix=view.weights, rows=view.queries, columns=view.keys, title=view.title,
            row_axis="looks" + (" (each row sums to 1)" if view.is_share else ""), column_axis="is looked at",
        ),
        title=title,
    )  # fmt: skip


def _stream(view: StreamView, title: str) -> "Figure":
    layers = [f"layer {layer}" for layer in range(view.writes.shape[1])]
    maps = [HeatMap(matrix=view.residual.flip(0), rows=view.depths[::-1], columns=view.positions, title="the stream",
                    row_axis="", column_axis="")]  # fmt: skip
    maps += [
        HeatMap(matrix=rows.flip(0), rows=layers[::-1], columns=view.positions, title=f"what {part} writes",
                row_axis="", column_axis="")
        for part, rows in zip(view.parts, view.writes, strict=True)
    ]  # fmt: skip
    heads = [f"head {head}" for head in range(view.head_writes.shape[1])]
    maps.append(HeatMap(
        matrix=view.head_writes.mean(-1).flip(0), rows=layers[::-1], columns=heads,
        title="what each head of self-attention writes\n(mean of all tokens)", row_axis="", column_axis="",
    ))  # fmt: skip
    in_a_row = 1 if len(view.positions) > 24 else 2
    return heat_maps(*maps, title=_joined(title, f"{view.stack}: lengths of vectors"), in_a_row=in_a_row)


def _lens(view: LensView, title: str) -> "Figure":
    """The deepest layer on top; colour is the probability of the guess, the last line what really came."""
    n = len(view.positions)
    shown = range(max(0, n - MOST_POSITIONS), n)
    n_depths = len(view.depths)
    drawn = new_figure(width=1.8 + 0.8 * len(shown), height=1.9 + 0.36 * n_depths)
    axis = drawn.subplots()
    best = view.probabilities[:, shown, 0].flip(0).float().cpu()
    image = axis.imshow(best.numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row in range(n_depths):
        for column, position in enumerate(shown):
            token = view.tokens[n_depths - 1 - row][position][0]
            ink = "black" if float(best[row, column]) > 0.55 else "white"
            axis.text(column, row, _short(token), ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(n_depths), view.depths[::-1], fontsize=8)
    axis.set_xticks(range(len(shown)), [_short(view.positions[i]) for i in shown], fontsize=8)
    axis.set_xlabel("read here")
    came = axis.secondary_xaxis("top")
    came.set_xticks(range(len(shown)), [_short(view.wanted[i] or "?") for i in shown], fontsize=8)
    came.set_xlabel("what really came next" if view.says_next else "what really stands there")
    drawn.colorbar(image, ax=axis, fraction=0.03, pad=0.01, label="p of the guess")
    cut = f"the last {len(shown)} of {n} tokens" if len(shown) < n else ""
    drawn.suptitle(_joined(title, cut), fontsize="medium")
    return drawn


def _timeline(view: TimelineView, title: str) -> "Figure":
    """Above, for each pattern the head that shows it most; below, what came next, depth by depth."""
    n_parts = 1 if view.wanted_probabilities is None else 2
    drawn = new_figure(width=8.0, height=3.6 * n_parts)
    axes = drawn.subplots(n_parts, 1, squeeze=False)[:, 0]
    best = view.scores.flatten(1, 2).amax(1).T.tolist()
    for pattern, values, (colour, marker) in zip(PATTERNS, best, LOOKS, strict=True):
        axes[0].plot(view.steps, values, color=colour, marker=marker, markersize=4, label=pattern)
    axes[0].set(xlabel="step", ylabel="score of the best head", ylim=(-0.02, 1.02))
    axes[0].legend(frameon=False, fontsize="small", ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[0].spines[["top", "right"]].set_visible(False)
    if view.wanted_probabilities is not None:
        _lens_by_step(axes[1], view)
    drawn.suptitle(title, fontsize="medium")
    return drawn


def _lens_by_step(axis: "Axes", view: TimelineView) -> None:
    assert view.wanted_probabilities is not None
    by_depth = view.wanted_probabilities.nanmean(-1).T.flip(0)
    image = axis.imshow(by_depth.cpu().numpy(), cmap="viridis", vmin=0, aspect="auto")
    ticks = range(0, len(view.steps), ceil(len(view.steps) / 12))
    axis.set_xticks(ticks, [f"{view.steps[i]:,}" for i in ticks])
    axis.set_yticks(range(len(view.depths)), view.depths[::-1], fontsize=8)
    axis.set(xlabel="step")
    axis.figure.colorbar(image, ax=axis, fraction=0.04, pad=0.02, label="mean p of what came next")


def _short(token: str) -> str:
    return token if len(token) <= 9 else f"{token[:8]}…"


def _joined(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
