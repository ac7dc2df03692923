"""Can attention weights alone turn bigram statistics into context? (They cannot; a learned head can.)"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import Heatmap, plot_heatmaps, record
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.lessons.toy_head import ToyHead, train

WORDS = ("<start>", "the", "man", "chicken", "ordered")
IDS = (1, 2, 3, 5, 2, 4)
"""The slide's ids, which count from 1: <start> the man ordered the chicken."""
SEQUENCE = tuple(i - 1 for i in IDS)
MAN, CHICKEN = WORDS.index("man"), WORDS.index("chicken")
LABELS = [f"{t} {WORDS[i]}" for t, i in enumerate(SEQUENCE)]

Table = Float[Tensor, "position vocabulary"]


def bigram() -> Table:
    """X: at each position, what follows this token in the data; <start> follows the last token."""
    follows = torch.zeros(len(WORDS), len(WORDS))
    for this, after in zip(SEQUENCE, (*SEQUENCE[1:], SEQUENCE[0]), strict=True):
        follows[this, after] += 1
    return (follows / follows.sum(1, keepdim=True))[list(SEQUENCE)]


def wanted() -> Table:
    """The target: after each position, the token that really comes."""
    return F.one_hot(torch.tensor((*SEQUENCE[1:], SEQUENCE[0])), len(WORDS)).float()


def best_mix(x: Table) -> Table:
    """W·X for the W (any T×T matrix, rows free) that comes nearest to the target in squares."""
    x, target = x.double(), wanted().double()
    # W·X = target is Xᵀ·Wᵀ = targetᵀ; gelsd also solves it where X has no full rank.
    weights = torch.linalg.lstsq(x.T, target.T, driver="gelsd").solution.T
    return (weights @ x).float().round(decimals=6) + 0.0  # no −0.0, no rounding dust


def learn(seed: int, *, with_positions: bool = True, causal: bool = True) -> tuple[ToyHead, Table]:
    """A head trained on X, and the probabilities it gives."""
    head = ToyHead(len(SEQUENCE), len(WORDS), seed=seed, with_positions=with_positions, causal=causal)
    train(head, bigram()[None], wanted()[None])
    with torch.no_grad():
        return head, head(bigram()[None])[0].softmax(-1)


def lesson(seed: int) -> DrawFigure:
    x, target = bigram(), wanted()
    print_section("The data: one sequence, T = 6, and its bigram table X (T×V), V = 5")
    print_table(["token", "id"], [(word, i) for i, word in enumerate(WORDS, start=1)])
    print_text(f"<start> the man ordered the chicken = {list(IDS)}. X says what follows a token anywhere in the data:")
    print_matrix(x, rows=LABELS, columns=WORDS)
    print_text("The target tells the two *the* apart: → man at position 1, → chicken at position 4.")
    print_matrix(target, rows=LABELS, columns=WORDS)
    best = _no_mix_reaches_it(x, target)
    learned = _a_head_reaches_it(seed, x)
    _which_part_does_it(seed)
    titles = ("X: bigram table", "best W·X (least squares)", "learned head on X + positions")
    maps = [
        Heatmap(matrix=m, rows=LABELS, columns=WORDS, title=title, row_axis="position", column_axis="next token")
        for m, title in zip((x, best, learned), titles, strict=True)
    ]
    return lambda: plot_heatmaps(
        *maps, title="Five tokens: no mix of X's rows tells man from chicken; a learned head does"
    )


def _no_mix_reaches_it(x: Table, target: Table) -> Table:
    print_section("No W·X reaches the target, whatever W")
    gap = (x[:, MAN] - x[:, CHICKEN]).abs().max().item()
    print_text(f"""Columns man and chicken of X are equal: max|difference| = {gap:.0f}. W mixes rows, so they stay equal
        in every W·X; in the target they differ. The best W by least squares gives:""")
    best = best_mix(x)
    print_matrix(best, rows=LABELS, columns=WORDS)
    distance = (best - target).square().sum().item()
    print_text(f"Squared distance to the target: {distance:.2f}; the two rows of *the* stay at half and half.")
    zeroed = x.clone()
    zeroed[-1] = 0
    without = (best_mix(zeroed) - target).square().sum().item()
    print_slide_error(f"""the last row of X (chicken → <start>) is 1.0 on one slide and 0 on the next. With 0, column <start>
        of X is empty and the target's last row cannot be reached either: the best squared distance becomes
        {without:.2f}.""")
    return best


def _a_head_reaches_it(seed: int, x: Table) -> Table:
    print_section("A learned head on X + positions reaches it: softmax(QKᵀ/√H)·V·W_out")
    head, learned = learn(seed)
    with record(head, "attention.weights") as trace, torch.no_grad():
        head(x[None])
    print_matrix(learned, rows=LABELS, columns=WORDS, digits=3)
    print_text("Its attention weights (T×T), masked before the softmax:")
    print_matrix(trace["attention.weights"][0, 0], rows=LABELS, columns=[row.split()[0] for row in LABELS], digits=3)
    print_slide_error("""A's text takes softmax(W ⊙ Mask): a masked score of 0 still gets weight. A's code gives the mask to
        the softmax, which is right, and so do we. Lesson wrong-masks compares them.""")
    return learned


def _which_part_does_it(seed: int) -> None:
    print_section("Which part tells the two 'the' apart?")
    rows = []
    for with_positions, causal in ((True, True), (True, False), (False, True), (False, False)):
        _, p = learn(seed, with_positions=with_positions, causal=causal)
        on = ["yes" if part else "no" for part in (with_positions, causal)]
        rows.append((*on, p[1, MAN].item(), p[4, CHICKEN].item()))
    print_table(["positions", "causal mask", "the → man at 1", "the → chicken at 4"], rows, digits=3)
    print_text("""Rows 1 and 4 of X are equal. Positions tell them apart; so does the mask, for position 4 sees more
        than position 1. With neither, both see the same and must answer the same.""")
