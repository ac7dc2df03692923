"""Lesson: a Transformer without position encodings is equivariant to permutations of its input."""

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
    """Return the hidden states of an untrained two-layer model in float64, which makes rounding negligible."""
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
    """Compute max|f(permuted x) − permuted f(x)|, which is 0 if the model ignores the order of its input."""
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
    print_text(f"""The table compares the hidden states of “{FIRST}” and “{SECOND}” after two blocks without a mask.
        Both sentences contain the same words, so each word has a counterpart in the other sentence.""")
    rows = []
    for i, word in enumerate(FIRST.split()):
        j = SECOND.split().index(word) if word != "the" or i == 0 else 3
        rows.append((f"{word} ({i} and {j})", *(f"{distances[kind][i, j].item():.1e}" for kind in distances)))
    print_table(["word (its two positions)", "‖difference‖ without positions", "with learned positions"], rows)
    print_text("""Without position encodings, the dog that bites and the dog that is bitten have the same vector (up to
        rounding errors), so no later layer can distinguish them.""")

    print_section("Permuting the input permutes the output")
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
    print_text(f"""The table shows max|f(Px) − P·f(x)| for {len(EXAMPLE_WORDS)} words. The shuffled order is
        {shuffled.tolist()}. Values of about 1e-15 are rounding errors, so f(Px) and P·f(x) are equal. As lectures B, D
        and E state, a model without position encodings and without a mask ignores the order of its input.""")
    print_text("""The lectures omit two facts. First, a causal mask is enough to break the symmetry because the first
        token attends to one token and the second token attends to two. Second, ALiBi without a mask depends on the
        distance between two tokens but not on the direction. A model that uses ALiBi without a mask therefore cannot
        distinguish a sentence from its reversal.""")
    heatmaps = [
        Heatmap(
            matrix=distances[kind],
            rows=FIRST.split(),
            columns=SECOND.split(),
            title=title,
            row_axis=f"“{FIRST}”",
            column_axis=f"“{SECOND}”",
        )
        for kind, title in zip(distances, ("without position encodings", "with learned positions"), strict=True)
    ]
    return lambda: plot_heatmaps(
        *heatmaps, title="Distances between the word vectors of two sentences (0: identical vectors)"
    )


def _sentence_to_ids(sentence: str) -> Int[Tensor, "1 position"]:
    return torch.tensor([[EXAMPLE_WORDS.index(word) for word in sentence.split()]])
