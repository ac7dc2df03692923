"""What do the heads of a trained model look at? Some patterns have names."""

from qkv.choices import HeadPattern
from qkv.inspection import PATTERNS, HeadsView, classify_heads, compute_neuron_view, prepare_input, run_with_cache
from qkv.inspection.plot import plot_view
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as

SENTENCE = "Tim put a green frog on the old boat, and Lily sang a song."
TEXT = f"{SENTENCE} {SENTENCE}"
"""The same twice: whoever looks for what came after the same token before must find it."""
SAID = {
    HeadPattern.PREVIOUS: "the token before",
    HeadPattern.FIRST: "the first token, where weight goes that has no better place (a sink)",
    HeadPattern.DELIMITER: "punctuation and special tokens",
    HeadPattern.BAG: "everything alike, as if order did not matter",
    HeadPattern.DUPLICATE: "the same token elsewhere",
    HeadPattern.INDUCTION: "what came after the same token before",
}


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing here is chance
    task = load_as(LanguageModel, "stories")
    seen = run_with_cache(task.model, prepare_input(task, TEXT))
    view = classify_heads(seen)
    n_layers, n_heads = view.weights.shape[:2]
    print_section(f"{n_layers} layers × {n_heads} heads of `stories` read a sentence twice")
    print_text(f"“{SENTENCE}” (twice)")
    print_table(["pattern", "a head looks at"], list(SAID.items()))

    print_section("The head that shows each pattern most")
    print_table(
        ["pattern", "layer", "head", "its score", "an even head's"], [_best(view, p) for p in PATTERNS], digits=3
    )
    named = sum(label is not None for layer in view.labels for label in layer)
    print_text(f"""A score is the weight that goes where the pattern says, as a mean over the tokens that have such a place
        (bag-of-words: entropy ÷ the greatest entropy). {named} of the {n_layers * n_heads} heads reach the 0.4 (or
        0.95, bag-of-words) that names a head; most do something for which there is no word. Weights were recomputed
        from queries and keys beside the fused kernel: max|A·V − output| = {view.error:.1g}.""")

    layer, head = (int(cell) for cell in _best(view, HeadPattern.PREVIOUS)[1:3])
    back = view.weights[layer, head].diagonal(-1)
    one = compute_neuron_view(seen, layer=layer, head=head, query=int(back[2:].argmax()) + 3)
    print_section(f"Query·key: how {one.query_label} comes to its weights in layer {layer}, head {head}")
    order = one.weights.argsort(descending=True)[:5].tolist()
    print_table(
        ["key", "place", "q·k", "÷ √d", "weight"],
        [(one.keys[i], i, float(one.dots[i]), float(one.scores[i]), float(one.weights[i])) for i in order],
        digits=3,
    )
    print_text(
        "An attention weight is not by itself an explanation; `qkv lesson what-it-refers-to` asks the model instead."
    )
    return lambda: plot_view(view, title=TEXT)


def _best(view: HeadsView, pattern: HeadPattern) -> tuple[str, int, int, float, float]:
    place = PATTERNS.index(pattern)
    scores = view.scores[..., place]
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return str(pattern), layer, head, float(scores[layer, head]), view.uniform_scores[place]
