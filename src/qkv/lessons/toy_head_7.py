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
    """Return the target distribution of the next token at each position.

    Both sentences begin with `<start>`, so the target after `<start>` is `man` or `woman` with probability 1/2 each.
    """
    target = F.one_hot(SENTENCE_IDS.roll(-1, dims=1), len(TOY_WORDS_7)).float()
    target[:, 0] = target[:, 0].mean(0)
    return target


def bigram_distribution_by_position() -> Table:
    """Return the next-token distribution of the token at each position, computed from counts in the two sentences."""
    follows = torch.zeros(len(TOY_WORDS_7), len(TOY_WORDS_7)).index_add_(
        0, SENTENCE_IDS.flatten(), next_token_target_probabilities().flatten(0, 1)
    )
    return (follows / follows.sum(1, keepdim=True))[SENTENCE_IDS]


def train_head_and_predict_on(seed: int, x: Table) -> tuple[ToyHead, Table]:
    """Train an attention head of width H = 20 on x, and return the head and its predicted probabilities."""
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
    print_slide_error(f"""The code on the slide ends with softmax(QKᵀ/√H)·V, which has shape T×H =
        {head_shape[0]}×{head_shape[1]}. However, the predictions on the slide have shape T×V =
        {predictions.shape[1]}×{predictions.shape[2]}. The code omits the layer attention.out_proj, which is listed in
        the table above.""")
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
        print_text(f"“{sentence}”: the first table is computed, and the second is from the slide.")
        for p in (computed[i], SLIDE_PREDICTIONS[i]):
            print_matrix(
                torch.cat((p, p.sum(1, keepdim=True)), dim=1), rows=SENTENCE_LABELS[i], columns=columns, digits=3
            )
    print_slide_error("""The rows do not sum to 1, so they are not distributions over the next token. Each cell seems to
        be a separate binary prediction: in the row of <start>, man and woman both have the value .988. The computed
        rows are softmax distributions.""")


def _print_computed_and_slide_weights(computed: Table) -> None:
    print_section("Attention weights (T×T): computed (left) and from the slide (right)")
    for i, labels in enumerate(SENTENCE_LABELS):
        both = [
            [label, *a, "  ", *b]
            for label, a, b in zip(labels, computed[i].tolist(), SLIDE_TOY_WEIGHTS[i].tolist(), strict=True)
        ]
        positions = [str(t) for t in range(len(labels))]
        print_table(["", *positions, "  ", *positions], both, digits=3)
    print_text("""The weights in row “3 the” depend on the seed (try --seed 1). The head may predict one noun by default
        and attend to the subject only in the sentence with the other noun. On the slide, the head attends to the
        subject in both sentences, with a weight of .213 on man and .769 on woman.""")


def _print_predictions_with_masked_edge(head: ToyHead, x: Table, unmasked: Table) -> None:
    print_section("Masking attention from 'the' (position 3) to man or woman (position 1)")
    with mask_attention(head, "attention", query=3, key=1), torch.no_grad():
        masked = head(x).softmax(-1)
    rows = [
        (name, p[0, 3, CHICKEN].item(), p[0, 3, BEEF].item(), p[1, 3, CHICKEN].item(), p[1, 3, BEEF].item())
        for name, p in (("unmasked", unmasked), ("3 → 1 masked", masked))
    ]
    print_table(["", "man: chicken", "man: beef", "woman: chicken", "woman: beef"], rows, digits=3)
    print_text(
        "If attention from position 3 to position 1 is masked, the head makes the same prediction for both sentences. "
        "All information about the subject therefore passes through this attention weight."
    )


def _print_predictions_from_bigram_inputs(seed: int) -> None:
    print_section("X must be one-hot here, unlike in the five-token example, where X is a bigram table")
    x = bigram_distribution_by_position()
    _, p = train_head_and_predict_on(seed, x)
    difference = (x[0, 1] - x[1, 1]).abs().max().item()
    print_text(f"""In the bigram table, man and woman have identical rows (max|difference| = {difference:.0f}) because
        both are always followed by ordered. The model therefore receives the same input for both sentences. A head
        trained on this input predicts chicken with probability {p[0, 3, CHICKEN].item():.3f} after man and beef with
        probability {p[1, 3, BEEF].item():.3f} after woman.""")
