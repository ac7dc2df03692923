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
"""Token ids of “<start> the man ordered the chicken”, which are numbered from 1 on the slide."""
SEQUENCE = tuple(i - 1 for i in SLIDE_IDS)
MAN_ID, CHICKEN_ID = TOY_WORDS_5.index("man"), TOY_WORDS_5.index("chicken")
POSITION_LABELS = [f"{t} {TOY_WORDS_5[i]}" for t, i in enumerate(SEQUENCE)]

TokenTable = Float[Tensor, "position vocabulary"]


def bigram_distribution_by_position() -> TokenTable:
    """Return the table X, which contains, for each position, the next-token distribution of the token at this position.

    The distributions are computed from counts in the data. The token after the last token is `<start>`.
    """
    follows = torch.zeros(len(TOY_WORDS_5), len(TOY_WORDS_5))
    for token, next_token in zip(SEQUENCE, (*SEQUENCE[1:], SEQUENCE[0]), strict=True):
        follows[token, next_token] += 1
    return (follows / follows.sum(1, keepdim=True))[list(SEQUENCE)]


def target_table() -> TokenTable:
    """Return the target table, which contains a one-hot vector of the actual next token at each position."""
    return F.one_hot(torch.tensor((*SEQUENCE[1:], SEQUENCE[0])), len(TOY_WORDS_5)).float()


def least_squares_fit_to_target(x: TokenTable) -> TokenTable:
    """Return W·X for the T×T matrix W that minimizes the squared distance to the target."""
    x, target = x.double(), target_table().double()
    # W·X = target is equivalent to Xᵀ·Wᵀ = targetᵀ. The gelsd driver also works if X does not have full rank.
    weights = torch.linalg.lstsq(x.T, target.T, driver="gelsd").solution.T
    return (weights @ x).float().round(decimals=6) + 0.0  # avoids −0.0 and rounding errors


def train_head_and_predict(
    seed: int, *, with_positions: bool = True, causal: bool = True
) -> tuple[ToyHead, TokenTable]:
    """Train an attention head on X, and return the head and its predicted probabilities."""
    head = ToyHead(len(SEQUENCE), len(TOY_WORDS_5), seed=seed, with_positions=with_positions, causal=causal)
    train_toy_head(head, bigram_distribution_by_position()[None], target_table()[None])
    with torch.no_grad():
        return head, head(bigram_distribution_by_position()[None])[0].softmax(-1)


def lesson(seed: int) -> DrawFigure:
    x, target = bigram_distribution_by_position(), target_table()
    print_section("The data: one sequence of T = 6 tokens and its bigram table X (T×V with V = 5)")
    print_table(["token", "id"], [(word, i) for i, word in enumerate(TOY_WORDS_5, start=1)])
    print_text(f"""The ids of “<start> the man ordered the chicken” are {list(SLIDE_IDS)}. Each row of X contains the
        distribution of the next token in the data:""")
    print_matrix(x, rows=POSITION_LABELS, columns=TOY_WORDS_5)
    print_text("The two occurrences of *the* have different targets: man at position 1 and chicken at position 4.")
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
    print_section("No matrix W satisfies W·X = target")
    difference = (x[:, MAN_ID] - x[:, CHICKEN_ID]).abs().max().item()
    print_text(f"""The columns man and chicken of X are equal: max|difference| = {difference:.0f}. The rows of W·X are
        combinations of the rows of X, so the columns man and chicken of W·X are equal for every W. In the target, these
        columns differ. The W with the smallest squared distance to the target gives this W·X:""")
    best = least_squares_fit_to_target(x)
    print_matrix(best, rows=POSITION_LABELS, columns=TOY_WORDS_5)
    distance = (best - target).square().sum().item()
    print_text(f"""The squared distance to the target is {distance:.2f}. In both rows of *the*, man and chicken have
        probability 1/2 each.""")
    zeroed_x = x.clone()
    zeroed_x[-1] = 0
    zeroed_distance = (least_squares_fit_to_target(zeroed_x) - target).square().sum().item()
    print_slide_error(f"""The entry chicken → <start> in the last row of X is 1.0 on one slide and 0 on the next. If
        this entry is 0, the column <start> of X contains only zeros, so W·X cannot match the last row of the target
        either. The smallest squared distance is then {zeroed_distance:.2f}.""")
    return best


def _print_trained_head_predictions(seed: int, x: TokenTable) -> TokenTable:
    print_section("A head trained on X + positions predicts the target: softmax(QKᵀ/√H)·V·W_out")
    head, learned = train_head_and_predict(seed)
    with record(head, "attention.weights") as cache, torch.no_grad():
        head(x[None])
    print_matrix(learned, rows=POSITION_LABELS, columns=TOY_WORDS_5, digits=3)
    print_text("The attention weights of the head (T×T), with the mask applied before the softmax:")
    print_matrix(
        cache["attention.weights"][0, 0],
        rows=POSITION_LABELS,
        columns=[row.split()[0] for row in POSITION_LABELS],
        digits=3,
    )
    print_slide_error("""The text of lecture A uses softmax(W ⊙ Mask), which sets masked scores to 0, so the masked keys
        still receive weight. The code of lecture A is correct: like qkv, it passes the mask to the softmax. `qkv lesson
        wrong-masks` compares the two methods.""")
    return learned


def _print_position_and_mask_ablations(seed: int) -> None:
    print_section("Which component distinguishes the two occurrences of 'the'?")
    rows = []
    for with_positions, causal in ((True, True), (True, False), (False, True), (False, False)):
        _, p = train_head_and_predict(seed, with_positions=with_positions, causal=causal)
        enabled = ["yes" if component else "no" for component in (with_positions, causal)]
        rows.append((*enabled, p[1, MAN_ID].item(), p[4, CHICKEN_ID].item()))
    print_table(["positions", "causal mask", "the → man at 1", "the → chicken at 4"], rows, digits=3)
    print_text("""Rows 1 and 4 of X are equal. The position encodings distinguish positions 1 and 4. The causal mask
        also distinguishes them because position 4 attends to more tokens than position 1. With neither position
        encodings nor a causal mask, the head receives the same input at both positions, so the outputs must be the
        same.""")
