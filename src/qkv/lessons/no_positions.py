"""Lesson: a Transformer without positions is equivariant to permutations of its input."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.inspection import Heatmap, plot_heatmaps
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.models import GPT

EXAMPLE_WORDS = ("the", "dog", "bit", "man", "a", "fat", "cat")
FIRST, SECOND = "the dog bit the man", "the man bit the dog"
KINDS = (
    PositionKind.NONE,
    PositionKind.LEARNED,
    PositionKind.SINUSOIDAL,
    PositionKind.ROTARY,
    PositionKind.ALIBI,
    PositionKind.RELATIVE,
)


def untrained_gpt_states(
    ids: Int[Tensor, "batch position"], *, kind: PositionKind, causal: bool, seed: int = 0
) -> Float[Tensor, "batch position d"]:
    """Hidden states of an untrained two-layer model in float64, so that rounding errors are negligible."""
    config = GPTConfig(
        vocab_size=len(EXAMPLE_WORDS),
        context_length=16,
        d_model=32,
        n_heads=4,
        n_layers=2,
        positions=kind,
        causal=causal,
        init_std=0.3,
    )
    with torch.no_grad():
        return GPT(config, seed=seed).double().eval().hidden_states(ids)


def permutation_equivariance_error(
    order: Int[Tensor, " position"], *, kind: PositionKind, causal: bool, seed: int = 0
) -> float:
    """Compute max|f(permuted x) − permuted f(x)|, which is 0 if the model ignores order."""
    ids = torch.arange(len(EXAMPLE_WORDS))[None]
    original = untrained_gpt_states(ids, kind=kind, causal=causal, seed=seed)
    permuted = untrained_gpt_states(ids[:, order], kind=kind, causal=causal, seed=seed)
    return (permuted - original[:, order]).abs().max().item()


def lesson(seed: int) -> DrawFigure:
    print_section("Two sentences with the same words")
    first, second = (_sentence_to_ids(sentence) for sentence in (FIRST, SECOND))
    distances = {}
    for kind in (PositionKind.NONE, PositionKind.LEARNED):
        a, b = (untrained_gpt_states(ids, kind=kind, causal=False, seed=seed)[0] for ids in (first, second))
        distances[kind] = torch.cdist(a, b)
    print_text(f"""This table compares the hidden states of “{FIRST}” and “{SECOND}” after two blocks without a mask.
        The sentences have the same words, so each word has a counterpart in the other sentence:""")
    rows = []
    for i, word in enumerate(FIRST.split()):
        j = SECOND.split().index(word) if word != "the" or i == 0 else 3
        rows.append((f"{word} ({i} and {j})", *(f"{distances[kind][i, j].item():.1e}" for kind in distances)))
    print_table(["word (its two positions)", "‖difference‖ without positions", "with learned positions"], rows)
    print_text("""Without positions, the dog that bites and the dog that is bitten have the same vector (up to
        rounding), so no later layer can distinguish them.""")

    print_section("Permuted input gives permuted output")
    shuffled, reversed_order = torch.randperm(len(EXAMPLE_WORDS)), torch.arange(len(EXAMPLE_WORDS)).flip(0)
    if torch.equal(shuffled, torch.arange(len(EXAMPLE_WORDS))):
        shuffled = shuffled.roll(1)
    print_table(
        ["positions", "shuffled", "reversed", "shuffled, causal mask", "reversed, causal mask"],
        [
            (
                kind.value,
                *(
                    f"{permutation_equivariance_error(order, kind=kind, causal=causal, seed=seed):.1e}"
                    for causal in (False, True)
                    for order in (shuffled, reversed_order)
                ),
            )
            for kind in KINDS
        ],
    )
    print_text(f"""The table shows max|f(Px) − P·f(x)| for {len(EXAMPLE_WORDS)} words and the order
        {shuffled.tolist()}. Values of about 1e-15 mean equality. Without positions and without a mask, the model
        ignores order, as lectures B, D and E state.""")
    print_text("""The lectures omit two facts. A causal mask already breaks the symmetry, because the first token
        attends to one token and the second to two. And ALiBi without a mask depends on distance but not on direction,
        so it cannot distinguish a sentence from its reversal.""")
    heatmaps = [
        Heatmap(
            matrix=distances[kind],
            rows=FIRST.split(),
            columns=SECOND.split(),
            title=title,
            row_axis=f"“{FIRST}”",
            column_axis=f"“{SECOND}”",
        )
        for kind, title in zip(distances, ("without positions", "with learned positions"), strict=True)
    ]
    return lambda: plot_heatmaps(*heatmaps, title="Distance between word vectors in two orders (0: the same vector)")


def _sentence_to_ids(sentence: str) -> Int[Tensor, "1 position"]:
    return torch.tensor([[EXAMPLE_WORDS.index(word) for word in sentence.split()]])
