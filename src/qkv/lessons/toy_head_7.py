"""Lesson: one attention head learns that the prediction depends on an earlier word."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import Heatmap, mask_attention, plot_heatmaps, record
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.lessons.toy_head import ToyHead, train_toy_head
from qkv.lessons.toy_head_slide import SLIDE_PREDICTIONS, SLIDE_TOY_WEIGHTS

TOY_WORDS_7 = ("<start>", "the", "man", "chicken", "ordered", "woman", "beef")
TOY_SENTENCES = ("<start> man ordered the chicken", "<start> woman ordered the beef")
SENTENCE_IDS = torch.tensor([[TOY_WORDS_7.index(word) for word in sentence.split()] for sentence in TOY_SENTENCES])
SENTENCE_LABELS = [[f"{t} {word}" for t, word in enumerate(sentence.split())] for sentence in TOY_SENTENCES]
CHICKEN, BEEF = TOY_WORDS_7.index("chicken"), TOY_WORDS_7.index("beef")
D_HEAD = 20

Table = Float[Tensor, "sentence position column"]


def next_token_target_probabilities() -> Table:
    """Target distributions. Both sentences begin with <start>, so man and woman follow it with probability one half."""
    target = F.one_hot(SENTENCE_IDS.roll(-1, dims=1), len(TOY_WORDS_7)).float()
    target[:, 0] = target[:, 0].mean(0)
    return target


def bigram_distribution_by_position() -> Table:
    """For each position, the distribution of the token that follows this token in the two sentences."""
    follows = torch.zeros(len(TOY_WORDS_7), len(TOY_WORDS_7)).index_add_(
        0, SENTENCE_IDS.flatten(), next_token_target_probabilities().flatten(0, 1)
    )
    return (follows / follows.sum(1, keepdim=True))[SENTENCE_IDS]


def train_head_and_predict_on(seed: int, x: Table) -> tuple[ToyHead, Table]:
    """Train a head of width H = 20 on x; return it with its predicted probabilities."""
    head = ToyHead(SENTENCE_IDS.shape[1], len(TOY_WORDS_7), d_head=D_HEAD, seed=seed)
    train_toy_head(head, x, next_token_target_probabilities())
    with torch.no_grad():
        return head, head(x).softmax(-1)


def lesson(seed: int) -> DrawFigure:
    x = F.one_hot(SENTENCE_IDS, len(TOY_WORDS_7)).float()
    head, predictions = train_head_and_predict_on(seed, x)
    with record(head, "attention.weights", "attention.head_outputs") as cache, torch.no_grad():
        head(x)
    weights = cache["attention.weights"][:, 0]

    print_section("The head")
    print_table(
        ["parameter", "shape", "numbers"],
        [(name, "×".join(map(str, p.shape)), p.numel()) for name, p in head.named_parameters()],
    )
    head_shape = tuple(cache["attention.head_outputs"][0, 0].shape)
    print_slide_error(f"""the code ends with softmax(QKᵀ/√H)·V, which has shape T×H = {head_shape[0]}×{head_shape[1]},
        but the printed predictions have shape T×V = {predictions.shape[1]}×{predictions.shape[2]}. The code omits the
        layer attention.out_proj shown above.""")
    _print_computed_and_slide_predictions(predictions)
    _print_computed_and_slide_weights(weights)
    _print_predictions_with_masked_edge(head, x, predictions)
    _print_predictions_from_bigram_inputs(seed)
    rows = [label for labels in SENTENCE_LABELS for label in labels]
    heatmaps = (
        Heatmap(
            matrix=predictions.flatten(0, 1),
            rows=rows,
            columns=TOY_WORDS_7,
            title="next token (one softmax per row)",
            row_axis="“… man …” above, “… woman …” below",
            column_axis="predicted",
        ),
        Heatmap(
            matrix=weights.flatten(0, 1),
            rows=rows,
            columns=[str(t) for t in range(SENTENCE_IDS.shape[1])],
            title="attention weights",
            row_axis="",
            column_axis="key position",
        ),
    )
    return lambda: plot_heatmaps(*heatmaps, title="One head: “the” predicts chicken after man and beef after woman")


def _print_computed_and_slide_predictions(computed: Table) -> None:
    print_section("Output T×V: the prediction after 'the' depends on the subject")
    columns = [*(word[:7] for word in TOY_WORDS_7), "sum"]
    for i, sentence in enumerate(TOY_SENTENCES):
        print_text(f"“{sentence}”: computed, then the slide")
        for p in (computed[i], SLIDE_PREDICTIONS[i]):
            print_matrix(
                torch.cat((p, p.sum(1, keepdim=True)), dim=1), rows=SENTENCE_LABELS[i], columns=columns, digits=3
            )
    print_slide_error("""the rows do not sum to 1, so they are not distributions over the next token; each cell seems
        to be a separate binary prediction (<start> gives .988 to man and .988 to woman). The computed rows are softmax
        distributions.""")


def _print_computed_and_slide_weights(computed: Table) -> None:
    print_section("Attention weights T×T: computed, and from the slide on the right")
    for i, labels in enumerate(SENTENCE_LABELS):
        both = [
            [label, *a, "  ", *b]
            for label, a, b in zip(labels, computed[i].tolist(), SLIDE_TOY_WEIGHTS[i].tolist(), strict=True)
        ]
        positions = [str(t) for t in range(len(labels))]
        print_table(["", *positions, "  ", *positions], both, digits=3)
    print_text("""The weights of row “3 the” depend on the seed (try --seed 1). The head may predict one noun by
        default and only attend to the other subject; the head on the slide attends to both: .213 on man, .769 on
        woman.""")


def _print_predictions_with_masked_edge(head: ToyHead, x: Table, unmasked: Table) -> None:
    print_section("Masking the edge from 'the' (3) to man or woman (1)")
    with mask_attention(head, "attention", query=3, key=1), torch.no_grad():
        masked = head(x).softmax(-1)
    rows = [
        (name, p[0, 3, CHICKEN].item(), p[0, 3, BEEF].item(), p[1, 3, CHICKEN].item(), p[1, 3, BEEF].item())
        for name, p in (("unmasked", unmasked), ("3 → 1 masked", masked))
    ]
    print_table(["", "man: chicken", "man: beef", "woman: chicken", "woman: beef"], rows, digits=3)
    print_text(
        "With this edge masked, both sentences have the same prediction: all of the context passes through this edge."
    )


def _print_predictions_from_bigram_inputs(seed: int) -> None:
    print_section("X must be one-hot here, unlike the bigram table of the 5-token example")
    x = bigram_distribution_by_position()
    _, p = train_head_and_predict_on(seed, x)
    difference = (x[0, 1] - x[1, 1]).abs().max().item()
    print_text(f"""In the bigram table, man and woman have the same row, because both are followed by ordered
        (max|difference| = {difference:.0f}), so the two sentences have the same input. The same head trained on this
        input predicts chicken with {p[0, 3, CHICKEN].item():.3f} after man and beef with {p[1, 3, BEEF].item():.3f}
        after woman.""")
