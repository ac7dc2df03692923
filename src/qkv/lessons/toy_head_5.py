"""Can attention weights alone turn bigram statistics into context? (They cannot; a learned head can.)"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import HeatMap, heat_maps, record
from qkv.lessons.printing import Draw, matrix, say, section, slip, table
from qkv.lessons.toy_head import ToyHead, train

WORDS = ("<start>", "the", "man", "chicken", "ordered")
IDS = (1, 2, 3, 5, 2, 4)
"""The slide's ids, which count from 1: <start> the man ordered the chicken."""
SEQUENCE = tuple(i - 1 for i in IDS)
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
    return (weights @ x).float()


def learn(seed: int, *, with_positions: bool = True, causal: bool = True) -> tuple[ToyHead, Table]:
    """A head trained on X, and the probabilities it gives."""
    head = ToyHead(len(SEQUENCE), len(WORDS), seed=seed, with_positions=with_positions, causal=causal)
    train(head, bigram()[None], wanted()[None])
    with torch.no_grad():
        return head, head(bigram()[None])[0].softmax(-1)


def lesson(seed: int) -> Draw:
    x, target = bigram(), wanted()
    section("The data: one sequence, T = 6, and its bigram table X (T×V), V = 5")
    table(["token", "id"], [(word, i) for i, word in enumerate(WORDS, start=1)])
    say(f"<start> the man ordered the chicken = {list(IDS)}. X says what follows a token anywhere in the data:")
    matrix(x, rows=LABELS, columns=WORDS)
    say("The target tells the two *the* apart: → man at position 1, → chicken at position 4.")
    matrix(target, rows=LABELS, columns=WORDS)

    section("No W·X reaches the target, whatever W")
    man, chicken = WORDS.index("man"), WORDS.index("chicken")
    gap = (x[:, man] - x[:, chicken]).abs().max().item()
    say(f"""Columns man and chicken of X are equal: max|difference| = {gap:.0f}. W mixes rows, so they stay equal in
        every W·X, and in the target they differ. The best W by least squares gives:""")
    best = best_mix(x)
    matrix(best, rows=LABELS, columns=WORDS)
    say(f"""Squared distance to the target: {(best - target).square().sum().item():.2f}; the two rows of *the* stay
        at half and half.""")
    zeroed = x.clone()
    zeroed[-1] = 0
    slip(f"""the last row of X (chicken → <start>) is 1.0 on two slides and 0 on the third. With 0 column <start> of
        X is empty, so the last row cannot be reached either: the best squared distance is
        {(best_mix(zeroed) - target).square().sum().item():.2f} instead of {(best - target).square().sum().item():.2f}.
        The target's last row needs the 1.0.""")

    head, learned = learn(seed)
    with record(head, "attention.weights") as trace, torch.no_grad():
        head(x[None])
    weights = trace["attention.weights"][0, 0]
    section("A learned head on X + positions reaches it: softmax(QKᵀ/√H)·V·W_out")
    matrix(learned, rows=LABELS, columns=WORDS, digits=3)
    say("Its attention weights (T×T), masked before the softmax:")
    matrix(weights, rows=LABELS, columns=[label.split()[0] for label in LABELS], digits=3)
    slip("""A multiplies W ⊙ Mask and then takes the softmax; a score of 0 still gets weight exp(0).
        Here, as in A's own code, the mask forbids the look (−∞ before softmax). See lesson wrong-masks.""")

    section("Which part tells the two 'the' apart?")
    rows = []
    for with_positions, causal in ((True, True), (True, False), (False, True), (False, False)):
        _, p = learn(seed, with_positions=with_positions, causal=causal)
        on = ["yes" if part else "no" for part in (with_positions, causal)]
        rows.append((*on, p[1, man].item(), p[4, chicken].item()))
    table(["positions", "causal mask", "the → man at 1", "the → chicken at 4"], rows, digits=3)
    say("""Rows 1 and 4 of X are equal. Positions tell them apart; so does the mask, for position 4 sees more than
        position 1. With neither, both see the same and must answer the same.""")

    def draw() -> object:
        maps = [
            HeatMap(matrix=m, rows=LABELS, columns=WORDS, title=title, row_axis="position", column_axis="next token")
            for m, title in (
                (x, "X: bigram table"),
                (best, "best W·X (least squares)"),
                (learned, "learned head on X + positions"),
            )
        ]
        return heat_maps(
            *maps, title="Toy task, 5 tokens: no mix of X's rows tells man from chicken; a learned head does"
        )

    return draw
