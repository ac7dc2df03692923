"""Lesson: no weighted sum of bigram rows captures context, but a trained attention head does."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import Heatmap, plot_heatmaps, record
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.lessons.toy_head import ToyHead, train_toy_head

TOY_WORDS_5 = ("<start>", "the", "man", "chicken", "ordered")
SLIDE_IDS = (1, 2, 3, 5, 2, 4)
"""The ids of the slide, counted from 1: <start> the man ordered the chicken."""
SEQUENCE = tuple(i - 1 for i in SLIDE_IDS)
MAN_ID, CHICKEN_ID = TOY_WORDS_5.index("man"), TOY_WORDS_5.index("chicken")
POSITION_LABELS = [f"{t} {TOY_WORDS_5[i]}" for t, i in enumerate(SEQUENCE)]

TokenTable = Float[Tensor, "position vocabulary"]


def bigram_distribution_by_position() -> TokenTable:
    """X: for each position, the distribution of the next token in the data; <start> follows the last token."""
    follows = torch.zeros(len(TOY_WORDS_5), len(TOY_WORDS_5))
    for token, next_token in zip(SEQUENCE, (*SEQUENCE[1:], SEQUENCE[0]), strict=True):
        follows[token, next_token] += 1
    return (follows / follows.sum(1, keepdim=True))[list(SEQUENCE)]


def target_table() -> TokenTable:
    """The target: the actual next token at each position."""
    return F.one_hot(torch.tensor((*SEQUENCE[1:], SEQUENCE[0])), len(TOY_WORDS_5)).float()


def least_squares_fit_to_target(x: TokenTable) -> TokenTable:
    """W·X for the T×T matrix W that minimizes the squared distance to the target."""
    x, target = x.double(), target_table().double()
    # W·X = target is Xᵀ·Wᵀ = targetᵀ; gelsd also works if X does not have full rank.
    weights = torch.linalg.lstsq(x.T, target.T, driver="gelsd").solution.T
    return (weights @ x).float().round(decimals=6) + 0.0  # avoids −0.0 and rounding errors


def train_head_and_predict(
    seed: int, *, with_positions: bool = True, causal: bool = True
) -> tuple[ToyHead, TokenTable]:
    """Train a head on X; return it with its predicted probabilities."""
    head = ToyHead(len(SEQUENCE), len(TOY_WORDS_5), seed=seed, with_positions=with_positions, causal=causal)
    train_toy_head(head, bigram_distribution_by_position()[None], target_table()[None])
    with torch.no_grad():
        return head, head(bigram_distribution_by_position()[None])[0].softmax(-1)


def lesson(seed: int) -> DrawFigure:
    x, target = bigram_distribution_by_position(), target_table()
    print_section("The data: one sequence, T = 6, and its bigram table X (T×V), V = 5")
    print_table(["token", "id"], [(word, i) for i, word in enumerate(TOY_WORDS_5, start=1)])
    print_text(f"""<start> the man ordered the chicken = {list(SLIDE_IDS)}. X contains the distribution of the token
        that follows each token in the data:""")
    print_matrix(x, rows=POSITION_LABELS, columns=TOY_WORDS_5)
    print_text("The target is different for the two occurrences of *the*: man at position 1, chicken at position 4.")
    print_matrix(target, rows=POSITION_LABELS, columns=TOY_WORDS_5)
    best = _print_best_row_combination(x, target)
    learned = _print_trained_head_predictions(seed, x)
    _print_position_and_mask_ablations(seed)
    titles = ("X: bigram table", "best W·X (least squares)", "trained head on X + positions")
    heatmaps = [
        Heatmap(
            matrix=m,
            rows=POSITION_LABELS,
            columns=TOY_WORDS_5,
            title=title,
            row_axis="position",
            column_axis="next token",
        )
        for m, title in zip((x, best, learned), titles, strict=True)
    ]
    return lambda: plot_heatmaps(*heatmaps, title="Five tokens: only a trained head distinguishes man and chicken")


def _print_best_row_combination(x: TokenTable, target: TokenTable) -> TokenTable:
    print_section("No W·X equals the target for any W")
    difference = (x[:, MAN_ID] - x[:, CHICKEN_ID]).abs().max().item()
    print_text(f"""The columns man and chicken of X are equal: max|difference| = {difference:.0f}. W combines rows, so
        these columns are equal in every W·X, but they differ in the target. The best W by least squares gives:""")
    best = least_squares_fit_to_target(x)
    print_matrix(best, rows=POSITION_LABELS, columns=TOY_WORDS_5)
    distance = (best - target).square().sum().item()
    print_text(f"""The squared distance to the target is {distance:.2f}; both rows of *the* predict man and chicken
        with probability one half.""")
    zeroed_x = x.clone()
    zeroed_x[-1] = 0
    zeroed_distance = (least_squares_fit_to_target(zeroed_x) - target).square().sum().item()
    print_slide_error(f"""the last row of X (chicken → <start>) is 1.0 on one slide and 0 on the next. With 0, the
        column <start> of X is empty, and the last row of the target cannot be reached either: the best squared
        distance is then {zeroed_distance:.2f}.""")
    return best


def _print_trained_head_predictions(seed: int, x: TokenTable) -> TokenTable:
    print_section("A trained head on X + positions reaches the target: softmax(QKᵀ/√H)·V·W_out")
    head, learned = train_head_and_predict(seed)
    with record(head, "attention.weights") as cache, torch.no_grad():
        head(x[None])
    print_matrix(learned, rows=POSITION_LABELS, columns=TOY_WORDS_5, digits=3)
    print_text("Its attention weights (T×T), with the mask applied before the softmax:")
    print_matrix(
        cache["attention.weights"][0, 0],
        rows=POSITION_LABELS,
        columns=[row.split()[0] for row in POSITION_LABELS],
        digits=3,
    )
    print_slide_error("""the text of lecture A uses softmax(W ⊙ Mask), where a masked score of 0 still has weight. The
        code of lecture A passes the mask to the softmax, which is correct, as in qkv. The lesson wrong-masks compares
        both.""")
    return learned


def _print_position_and_mask_ablations(seed: int) -> None:
    print_section("Which component distinguishes the two occurrences of 'the'?")
    rows = []
    for with_positions, causal in ((True, True), (True, False), (False, True), (False, False)):
        _, p = train_head_and_predict(seed, with_positions=with_positions, causal=causal)
        enabled = ["yes" if component else "no" for component in (with_positions, causal)]
        rows.append((*enabled, p[1, MAN_ID].item(), p[4, CHICKEN_ID].item()))
    print_table(["positions", "causal mask", "the → man at 1", "the → chicken at 4"], rows, digits=3)
    print_text("""Rows 1 and 4 of X are equal. Positions distinguish them, and so does the causal mask, because
        position 4 attends to more tokens than position 1. Without both, the two positions have the same input and must
        have the same output.""")
