"""Print inspection views as tables."""

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
    TrainingTimelineView,
    View,
)
from qkv.lessons.console import print_matrix, print_section, print_table, print_text

ATTENTION_CAVEAT = "Attention weights by themselves do not explain a prediction."
N_CONTRIBUTIONS = 15
"""Number of components that a logit attribution lists individually. The other components are summed."""


def print_view(view: View, changes: list[str]) -> None:
    """Print the interventions and then the view, without trailing blank lines."""
    with redirect_stdout(StringIO()) as output:
        if changes:
            _print_changes(changes)
        _print_view_body(view)
    print(output.getvalue().rstrip("\n"))


def _print_view_body(view: View) -> None:
    match view:
        case HeadsView():
            _print_head_patterns(view)
        case AttentionMapView():
            print_section(view.title)
            print_matrix(view.weights, rows=view.queries, columns=view.keys, corner="query → key")
            print_text(ATTENTION_CAVEAT)
        case NeuronView():
            _print_query_key_scores_and_weights(view)
        case ResidualStreamView():
            _print_residual_stream_norms(view)
        case LogitLensView():
            _print_logit_lens(view)
        case CoreferenceView():
            _print_coreference(view)
        case EmbeddingView():
            _print_embedding_projection_and_neighbors(view)
        case LogitAttribution():
            _print_logit_attribution(view)
        case InterventionEffect():
            _print_intervention_effect(view)
        case TrainingTimelineView():
            _print_pattern_scores_by_checkpoint(view)


def _print_changes(changes: list[str]) -> None:
    print_text(f"Interventions: {'; '.join(changes)}.")


def _print_head_patterns(view: HeadsView) -> None:
    print_section(f"{view.stack}: attention pattern of each head (max|A·V − output| = {view.error:.1g})")
    print_table(
        ["layer", "head", "label", *PATTERNS, "entropy", "distance"],
        [
            [
                layer,
                head,
                view.labels[layer][head] or "",
                *row.tolist(),
                float(view.entropy[layer, head]),
                float(view.distance[layer, head]),
            ]
            for layer, rows in enumerate(view.scores)
            for head, row in enumerate(rows)
        ],
        digits=2,
    )
    counts = ", ".join(f"{pattern} {n}" for pattern, n in zip(PATTERNS, view.n_queries, strict=True))
    print_text(
        f"Each score is averaged over those of the {len(view.queries)} tokens that can show the pattern: {counts}. "
        f"{ATTENTION_CAVEAT}"
    )


def _print_query_key_scores_and_weights(view: NeuronView) -> None:
    print_section(
        f"{view.stack}, layer {view.layer}, head {view.head}: attention weights of the query {view.query_label}"
    )
    columns = zip(
        view.keys, *(part.tolist() for part in (view.dots, view.scaled, view.scores, view.weights)), strict=True
    )
    print_table(["key", "q·k", "÷ √d", "masked", "weight"], columns, digits=3)


def _print_residual_stream_norms(view: ResidualStreamView) -> None:
    print_section(f"{view.stack}: norm of the residual stream at each token")
    print_matrix(view.residual_norms, rows=view.depths, columns=view.positions, corner="residual")
    for sublayer, norms in zip(view.sublayers, view.sublayer_norms, strict=True):
        layers = [f"layer {layer}" for layer in range(len(norms))]
        print_matrix(norms, rows=layers, columns=view.positions, corner=f"{sublayer} output")


def _print_logit_lens(view: LogitLensView) -> None:
    print_section("Logit lens: the most likely tokens after each layer, with probabilities")
    for position, token in enumerate(view.positions):
        target = view.targets[position]
        target_name = "next token" if view.predicts_next else "original token"
        print(f"{position}: {token}" + ("" if target is None else f"; {target_name}: {target}"))
        for depth, name in enumerate(view.depths):
            predictions = zip(view.tokens[depth][position], view.probabilities[depth, position].tolist(), strict=True)
            print(f"    {name:<15}" + "  ".join(f"{prediction} {p:.2f}" for prediction, p in predictions))
    print()


def _print_coreference(view: CoreferenceView) -> None:
    print_section(f"Candidates that {view.pronoun!r} may refer to")
    columns = view.columns
    rows = [[word, *(values[i] for values in columns.values())] for i, word in enumerate(view.candidates)]
    print_table(["candidate", *columns], rows, digits=3)
    print_text(f"{view.verdict[:1].upper()}{view.verdict[1:]}.")
    notes = [
        "Attention, rollout and value-weighted are the shares of the pronoun's attention that each candidate receives."
    ]
    if view.knock_out is not None:
        notes.append(
            f"Knock-out is the change in the log probability (nats) of the following text if {view.pronoun!r} cannot "
            "attend to the candidate. The lowest value indicates the word that the pronoun refers to."
        )
    for note in (*notes, *view.remarks, ATTENTION_CAVEAT):
        print_text(note)


def _print_embedding_projection_and_neighbors(view: EmbeddingView) -> None:
    print_section(
        "Final vector of each token (first two principal components) and its cosine similarity to the embedding"
    )
    last = view.points[-1].tolist()
    rows = [
        [token, *last[i], float(view.similarity[-1, i]), " ".join(f"{near} {p:.2f}" for near, p in view.neighbors[i])]
        for i, token in enumerate(view.tokens)
    ]
    print_table(["token", "PC 1", "PC 2", "similarity", "nearest tokens of the embedding matrix"], rows, digits=2)


def _print_logit_attribution(view: LogitAttribution) -> None:
    print_section(f"Largest contributions to the logit of {view.label} ({view.logit:.3f}) at position {view.position}")
    order = view.values.abs().argsort(descending=True)
    rows = [[view.names[i], float(view.values[i])] for i in order[:N_CONTRIBUTIONS].tolist()]
    rest = order[N_CONTRIBUTIONS:]
    if len(rest):
        rows.append([f"{len(rest)} others", float(view.values[rest].sum())])
    print_table(["component", "contribution"], [*rows, ["total", float(view.values.sum())]], digits=3)


def _print_intervention_effect(view: InterventionEffect) -> None:
    input_token = view.positions[view.position]
    location = input_token
    if view.generated is not None:
        location = f"{view.generated[view.position]} (after {input_token})"
    print_section(f"Log probabilities of the predictions at {location} before and after the interventions")
    _print_changes(view.changes)
    before, after = view.log_probs_before.tolist(), view.log_probs_after.tolist()
    rows = [[token, b, a, a - b] for token, b, a in zip(view.tokens, before, after, strict=True)]
    print_table(["token", "before", "after", "change"], rows, digits=3)
    print_text(
        f"KL(before ‖ after) is {float(view.divergence[view.position]):.4f} nats at this position. Its maximum over "
        f"all positions is {float(view.divergence.max()):.4f} nats."
    )


def _print_pattern_scores_by_checkpoint(view: TrainingTimelineView) -> None:
    print_section("Highest score of each attention pattern, and loss on the text, at each checkpoint")
    losses = view.losses or [float("nan")] * len(view.steps)
    best = view.scores.flatten(1, 2).amax(1).tolist()
    rows = [[step, *scores, loss] for step, scores, loss in zip(view.steps, best, losses, strict=True)]
    print_table(["step", *PATTERNS, "loss"], rows, digits=3)
