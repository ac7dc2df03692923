"""A view as a table on the terminal."""

from contextlib import redirect_stdout
from io import StringIO

from qkv.inspection import (
    PATTERNS,
    AttentionMapView,
    CoreferenceView,
    EmbeddingView,
    HeadsView,
    InterventionEffect,
    LogitAttribution,
    LogitLensView,
    NeuronView,
    ResidualStreamView,
    TimelineView,
    View,
)
from qkv.lessons.printing import matrix, say, section, table

NOT_AN_EXPLANATION = "An attention weight is not by itself an explanation."
N_PARTS = 15


def print_view(view: View, changes: list[str]) -> None:
    """Without the empty line that parts a lesson's tables: nothing follows."""
    with redirect_stdout(StringIO()) as printed:
        if changes:
            _changed(changes)
        _print(view)
    print(printed.getvalue().rstrip("\n"))


def _print(view: View) -> None:
    match view:
        case HeadsView():
            _heads(view)
        case AttentionMapView():
            section(view.title)
            matrix(view.weights, rows=view.queries, columns=view.keys, corner="looks at")
            say(NOT_AN_EXPLANATION)
        case NeuronView():
            _neuron(view)
        case ResidualStreamView():
            _stream(view)
        case LogitLensView():
            _lens(view)
        case CoreferenceView():
            _reference(view)
        case EmbeddingView():
            _embeddings(view)
        case LogitAttribution():
            _contributions(view)
        case InterventionEffect():
            _effect(view)
        case TimelineView():
            _timeline(view)


def _changed(changes: list[str]) -> None:
    say(f"Changed: {'; '.join(changes)}.")


def _heads(view: HeadsView) -> None:
    section(f"{view.stack}: what each head looks at (max|A·V − output| = {view.error:.1g})")
    table(
        ["layer", "head", "label", *PATTERNS, "entropy", "distance"],
        [
            [layer, head, view.labels[layer][head] or "", *row.tolist(), float(view.entropy[layer, head]),
             float(view.distance[layer, head])]
            for layer, rows in enumerate(view.scores) for head, row in enumerate(rows)
        ],
        digits=2,
    )  # fmt: skip
    asked = ", ".join(f"{pattern} {n}" for pattern, n in zip(PATTERNS, view.n_queries, strict=True))
    say(f"Scores are means over so many of the text's {len(view.queries)} tokens: {asked}. {NOT_AN_EXPLANATION}")


def _neuron(view: NeuronView) -> None:
    section(f"{view.stack}, layer {view.layer}, head {view.head}: how {view.query_label} comes to its weights")
    columns = zip(
        view.keys, *(part.tolist() for part in (view.dots, view.scaled, view.scores, view.weights)), strict=True
    )
    table(["key", "q·k", "÷ √d", "masked", "weight"], columns, digits=3)


def _stream(view: ResidualStreamView) -> None:
    section(f"{view.stack}: length of each token's vector")
    matrix(view.residual_norms, rows=view.depths, columns=view.positions, corner="stream")
    for part, rows in zip(view.sublayers, view.sublayer_norms, strict=True):
        layers = [f"layer {layer}" for layer in range(len(rows))]
        matrix(rows, rows=layers, columns=view.positions, corner=f"{part} writes")


def _lens(view: LogitLensView) -> None:
    section("The likeliest token after each layer, with its probability")
    for place, token in enumerate(view.positions):
        came = view.targets[place]
        said = "" if came is None else f"; {'next came' if view.predicts_next else 'there stands'} {came}"
        print(f"{place}: {token}{said}")
        for depth, name in enumerate(view.depths):
            guesses = zip(view.tokens[depth][place], view.probabilities[depth, place].tolist(), strict=True)
            print(f"    {name:<15}" + "  ".join(f"{guess} {p:.2f}" for guess, p in guesses))
    print()


def _reference(view: CoreferenceView) -> None:
    section(f"What does {view.pronoun!r} refer to?")
    columns = view.columns
    rows = [[word, *(values[i] for values in columns.values())] for i, word in enumerate(view.candidates)]
    table(["candidate", *columns], rows, digits=3)
    say(f"{view.verdict[:1].upper()}{view.verdict[1:]}.")
    meant = ["Attention, rollout and value-weighted are shares of its look: the largest points."]
    if view.knock_out is not None:
        meant.append(
            f"Knock-out is the change of log p (nats) of what follows when {view.pronoun!r} may not look at the word: "
            "below 0 it was needed, so the lowest points."
        )
    for remark in (*meant, *view.remarks, NOT_AN_EXPLANATION):
        say(remark)


def _embeddings(view: EmbeddingView) -> None:
    section("Where each token's vector lies, and how like its first one it still is (cosine)")
    last = view.points[-1].tolist()
    rows = [
        [token, *last[i], float(view.similarity[-1, i]), " ".join(f"{near} {p:.2f}" for near, p in view.neighbors[i])]
        for i, token in enumerate(view.tokens)
    ]
    table(["token", "first", "second", "likeness", "nearest in the token table"], rows, digits=2)


def _contributions(view: LogitAttribution) -> None:
    section(
        f"What was added to the logit of {view.label} ({view.logit:.3f}) at place {view.position}: the largest parts"
    )
    order = view.values.abs().argsort(descending=True)
    rows = [[view.names[i], float(view.values[i])] for i in order[:N_PARTS].tolist()]
    rest = order[N_PARTS:]
    if len(rest):
        rows.append([f"{len(rest)} others", float(view.values[rest].sum())])
    table(["part", "adds"], [*rows, ["all", float(view.values.sum())]], digits=3)


def _effect(view: InterventionEffect) -> None:
    at = view.positions[view.position]
    where = at if view.generated is None else f"{view.generated[view.position]}, after {at},"
    section(f"Guesses at {where} before and after the change (log p)")
    _changed(view.changes)
    before, after = view.before.tolist(), view.after.tolist()
    rows = [[token, b, a, a - b] for token, b, a in zip(view.tokens, before, after, strict=True)]
    table(["token", "before", "after", "change"], rows, digits=3)
    say(f"KL(before ‖ after) is {float(view.divergence[view.position]):.4f} nats there, "
        f"{float(view.divergence.max()):.4f} at most.")  # fmt: skip


def _timeline(view: TimelineView) -> None:
    section("At each checkpoint: the best head of each pattern, and how well the text is guessed")
    losses = view.losses or [float("nan")] * len(view.steps)
    best = view.scores.flatten(1, 2).amax(1).tolist()
    rows = [[step, *scores, loss] for step, scores, loss in zip(view.steps, best, losses, strict=True)]
    table(["step", *PATTERNS, "−log p"], rows, digits=3)
