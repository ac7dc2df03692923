"""What does a Transformer know of word order when it has no positions?"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.inspection import Heatmap, plot_heatmaps
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.models import GPT

WORDS = ("the", "dog", "bit", "man", "a", "fat", "cat")
FIRST, SECOND = "the dog bit the man", "the man bit the dog"
KINDS = (
    PositionKind.NONE,
    PositionKind.LEARNED,
    PositionKind.SINUSOIDAL,
    PositionKind.ROTARY,
    PositionKind.ALIBI,
    PositionKind.RELATIVE,
)


def states(
    ids: Int[Tensor, "batch position"], *, kind: PositionKind, causal: bool, seed: int = 0
) -> Float[Tensor, "batch position d"]:
    """What a new two-layer model makes of the ids, in float64 so that equal means equal."""
    config = GPTConfig(
        vocab_size=len(WORDS), context_length=16, d_model=32, n_heads=4, n_layers=2, positions=kind,
        causal=causal, init_std=0.3,
    )  # fmt: skip
    with torch.no_grad():
        return GPT(config, seed=seed).double().eval().hidden_states(ids)


def moved(order: Int[Tensor, " position"], *, kind: PositionKind, causal: bool, seed: int = 0) -> float:
    """max|f(permuted x) − permuted f(x)|: 0 where the model cannot see the order."""
    ids = torch.arange(len(WORDS))[None]
    straight = states(ids, kind=kind, causal=causal, seed=seed)
    permuted = states(ids[:, order], kind=kind, causal=causal, seed=seed)
    return (permuted - straight[:, order]).abs().max().item()


def lesson(seed: int) -> DrawFigure:
    print_section("Who bit whom?")
    first, second = (_ids(sentence) for sentence in (FIRST, SECOND))
    compared = {}
    for kind in (PositionKind.NONE, PositionKind.LEARNED):
        a, b = (states(ids, kind=kind, causal=False, seed=seed)[0] for ids in (first, second))
        compared[kind] = torch.cdist(a, b)
    print_text(f"""The vectors of “{FIRST}” and of “{SECOND}” after two blocks without a mask, compared word by word. The words
        are the same, so each has its partner in the other sentence:""")
    rows = []
    for i, word in enumerate(FIRST.split()):
        j = SECOND.split().index(word) if word != "the" or i == 0 else 3
        rows.append((f"{word} ({i} and {j})", *(f"{compared[kind][i, j].item():.1e}" for kind in compared)))
    print_table(["word (position in either)", "‖difference‖ without positions", "with a learned table"], rows)
    print_text("""Without positions the dog that bites and the dog that is bitten have one and the same vector (up to
        rounding). Nothing that reads it can tell them apart.""")

    print_section("Permuted input gives permuted output")
    shuffled, backwards = torch.randperm(len(WORDS)), torch.arange(len(WORDS)).flip(0)
    if torch.equal(shuffled, torch.arange(len(WORDS))):
        shuffled = shuffled.roll(1)
    print_table(
        ["positions", "shuffled", "reversed", "shuffled, causal mask", "reversed, causal mask"],
        [
            (kind.value, *(f"{moved(order, kind=kind, causal=causal, seed=seed):.1e}" for causal in (False, True)
             for order in (shuffled, backwards)))
            for kind in KINDS
        ],
    )  # fmt: skip
    print_text(f"""max|f(Px) − P·f(x)| on {len(WORDS)} words, order {shuffled.tolist()}. About 1e-15 means: equal. Without
        positions and mask the model is blind to order, as lectures B, D and E say.""")
    print_text("""Two things the lectures leave out. A causal mask alone already breaks the symmetry: the first token sees
        one, the second two. And ALiBi without a mask knows distance but not direction: it cannot tell a
        sentence from its reversal.""")
    maps = [
        Heatmap(
            matrix=compared[kind], rows=FIRST.split(), columns=SECOND.split(), title=title,
            row_axis=f"“{FIRST}”", column_axis=f"“{SECOND}”",
        )
        for kind, title in zip(compared, ("without positions", "with a learned table"), strict=True)
    ]  # fmt: skip
    return lambda: plot_heatmaps(*maps, title="Distance between words' vectors in two orders: 0 = the same vector")


def _ids(sentence: str) -> Int[Tensor, "one position"]:
    return torch.tensor([[WORDS.index(word) for word in sentence.split()]])
