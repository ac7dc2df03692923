"""Lesson: attention patterns of the heads of a trained model."""

from typing import NamedTuple

from qkv.choices import HeadPattern
from qkv.inspection import PATTERNS, HeadsView, classify_heads, compute_neuron_view, prepare_input, run_with_cache
from qkv.inspection.plot import plot_view
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as

EXAMPLE_SENTENCE = "Tim put a green frog on the old boat, and Lily sang a song."
TEXT = f"{EXAMPLE_SENTENCE} {EXAMPLE_SENTENCE}"
"""Example text, in which a sentence is repeated so that induction heads can attend to the token after the earlier
occurrence."""
PATTERN_DESCRIPTIONS = {
    HeadPattern.PREVIOUS: "the previous token",
    HeadPattern.FIRST: "the first token, which acts as an attention sink",
    HeadPattern.DELIMITER: "punctuation and special tokens",
    HeadPattern.BAG: "all tokens equally (bag of words)",
    HeadPattern.DUPLICATE: "other occurrences of the same token",
    HeadPattern.INDUCTION: "the token after an earlier occurrence of the same token",
}


class StrongestHead(NamedTuple):
    """The head with the highest score for a pattern."""

    pattern: str
    layer: int
    head: int
    score: float
    uniform_attention_score: float


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is random
    task = load_as(LanguageModel, "stories")
    cache = run_with_cache(task.model, prepare_input(task, TEXT))
    view = classify_heads(cache)
    n_layers, n_heads = view.weights.shape[:2]
    print_section(f"The heads of `stories` ({n_layers} layers × {n_heads} heads) on a repeated sentence")
    print_text(f"The text contains this sentence twice: “{EXAMPLE_SENTENCE}”")
    print_table(["pattern", "the head attends to"], list(PATTERN_DESCRIPTIONS.items()))

    print_section("The strongest head for each pattern")
    print_table(
        ["pattern", "layer", "head", "score", "score of uniform attention"],
        [_find_strongest_head(view, p) for p in PATTERNS],
        digits=3,
    )
    n_named = sum(label is not None for layer in view.labels for label in layer)
    print_text("""The score of a head is its mean attention weight on the positions that the pattern predicts, averaged
        over all tokens that have such positions. For bag of words, the score is the entropy divided by the maximum
        entropy.""")
    print_text(f"""{n_named} of the {n_layers * n_heads} heads have a score of at least 0.4 for some pattern (0.95 for
        bag of words). The other heads match none of these patterns.""")
    print_text(f"""The fused kernel does not return its attention weights A, so they are recomputed from the queries and
        keys. The kernel's output differs from A·V by at most {view.error:.1g}.""")

    previous_token_head = _find_strongest_head(view, HeadPattern.PREVIOUS)
    layer, head = previous_token_head.layer, previous_token_head.head
    previous_token_weights = view.weights[layer, head].diagonal(-1)
    neuron_view = compute_neuron_view(cache, layer=layer, head=head, query=int(previous_token_weights[2:].argmax()) + 3)
    print_section(f"Query·key products of the query {neuron_view.query_label} in layer {layer}, head {head}")
    order = neuron_view.weights.argsort(descending=True)[:5].tolist()
    print_table(
        ["key", "position", "q·k", "÷ √d", "weight"],
        [
            (
                neuron_view.keys[i],
                i,
                float(neuron_view.dots[i]),
                float(neuron_view.scores[i]),
                float(neuron_view.weights[i]),
            )
            for i in order
        ],
        digits=3,
    )
    print_text("""An attention weight by itself does not explain a prediction. `qkv lesson what-it-refers-to` measures
        how masking attention changes the predictions of the model.""")
    return lambda: plot_view(view, title=TEXT)


def _find_strongest_head(view: HeadsView, pattern: HeadPattern) -> StrongestHead:
    index = PATTERNS.index(pattern)
    scores = view.scores[..., index]
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return StrongestHead(
        pattern=str(pattern),
        layer=layer,
        head=head,
        score=float(scores[layer, head]),
        uniform_attention_score=view.uniform_scores[index],
    )
