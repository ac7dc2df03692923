"""Can one attention head learn that what was ordered depends on who ordered?"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import Heatmap, mask_attention, plot_heatmaps, record
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.lessons.toy_head import ToyHead, train
from qkv.lessons.toy_head_slide import SLIDE_PREDICTIONS, SLIDE_WEIGHTS

WORDS = ("<start>", "the", "man", "chicken", "ordered", "woman", "beef")
SENTENCES = ("<start> man ordered the chicken", "<start> woman ordered the beef")
IDS = torch.tensor([[WORDS.index(word) for word in sentence.split()] for sentence in SENTENCES])
LABELS = [[f"{t} {word}" for t, word in enumerate(sentence.split())] for sentence in SENTENCES]
CHICKEN, BEEF = WORDS.index("chicken"), WORDS.index("beef")
D_HEAD = 20

Table = Float[Tensor, "sentence position column"]


def wanted() -> Table:
    """What follows each position; <start> begins either sentence, so man and woman share it half and half."""
    target = F.one_hot(IDS.roll(-1, dims=1), len(WORDS)).float()
    target[:, 0] = target[:, 0].mean(0)
    return target


def bigram() -> Table:
    """What follows each position's token anywhere in the two sentences."""
    follows = torch.zeros(len(WORDS), len(WORDS)).index_add_(0, IDS.flatten(), wanted().flatten(0, 1))
    return (follows / follows.sum(1, keepdim=True))[IDS]


def learn(seed: int, x: Table) -> tuple[ToyHead, Table]:
    """A head of width H = 20 trained on x, and the probabilities it gives."""
    head = ToyHead(IDS.shape[1], len(WORDS), d_head=D_HEAD, seed=seed)
    train(head, x, wanted())
    with torch.no_grad():
        return head, head(x).softmax(-1)


def lesson(seed: int) -> DrawFigure:
    x = F.one_hot(IDS, len(WORDS)).float()
    head, predictions = learn(seed, x)
    with record(head, "attention.weights", "attention.head_outputs") as trace, torch.no_grad():
        head(x)
    weights = trace["attention.weights"][:, 0]

    print_section("The head")
    print_table(["parameter", "shape", "numbers"], [
        (name, "×".join(map(str, p.shape)), p.numel()) for name, p in head.named_parameters()
    ])  # fmt: skip
    heads = tuple(trace["attention.head_outputs"][0, 0].shape)
    print_slide_error(f"""its code ends at softmax(QKᵀ/√H)·V, which is T×H = {heads[0]}×{heads[1]}, but the printed predictions are
        T×V = {predictions.shape[1]}×{predictions.shape[2]}. attention.out_proj above is the layer it leaves out.""")
    _predictions(predictions)
    _weights(weights)
    _without_the_look(head, x, predictions)
    _bigram_is_not_enough(seed)
    rows = [label for labels in LABELS for label in labels]
    maps = (
        Heatmap(matrix=predictions.flatten(0, 1), rows=rows, columns=WORDS, title="next token (one softmax a row)",
                row_axis="“… man …” above, “… woman …” below", column_axis="predicted"),
        Heatmap(matrix=weights.flatten(0, 1), rows=rows, columns=[str(t) for t in range(IDS.shape[1])],
                title="attention weights", row_axis="", column_axis="position looked at"),
    )  # fmt: skip
    return lambda: plot_heatmaps(*maps, title="One head: “the” → chicken after man, → beef after woman")


def _predictions(ours: Table) -> None:
    print_section("Output T×V: what 'the' predicts depends on who ordered")
    columns = [*(word[:7] for word in WORDS), "sum"]
    for i, sentence in enumerate(SENTENCES):
        print_text(f"“{sentence}”: ours, then the slide's")
        for p in (ours[i], SLIDE_PREDICTIONS[i]):
            print_matrix(torch.cat((p, p.sum(1, keepdim=True)), dim=1), rows=LABELS[i], columns=columns, digits=3)
    print_slide_error("""its rows do not sum to 1, so they are no distribution over the next token: it is as if each cell
        were a yes or no of its own (<start> gives .988 to man and .988 to woman). Ours are one softmax a row.""")


def _weights(ours: Table) -> None:
    print_section("Attention weights T×T: ours and, to the right, the slide's")
    for i, labels in enumerate(LABELS):
        both = [
            [label, *a, "  ", *b]
            for label, a, b in zip(labels, ours[i].tolist(), SLIDE_WEIGHTS[i].tolist(), strict=True)
        ]
        places = [str(t) for t in range(len(labels))]
        print_table(["", *places, "  ", *places], both, digits=3)
    print_text("""How row “3 the” shares its weight differs from seed to seed (try --seed 1). One answer may be its habit,
        and only the other noun looked at; the slide's head looks at both: .213 on man, .769 on woman.""")


def _without_the_look(head: ToyHead, x: Table, free: Table) -> None:
    print_section("Forbid the look from 'the' (3) to man or woman (1)")
    with mask_attention(head, "attention", query=3, key=1), torch.no_grad():
        cut = head(x).softmax(-1)
    rows = [
        (name, p[0, 3, CHICKEN].item(), p[0, 3, BEEF].item(), p[1, 3, CHICKEN].item(), p[1, 3, BEEF].item())
        for name, p in (("free", free), ("3 → 1 cut", cut))
    ]
    print_table(["", "man: chicken", "man: beef", "woman: chicken", "woman: beef"], rows, digits=3)
    print_text("With that one edge cut both sentences get the same answer: all the context came through it.")


def _bigram_is_not_enough(seed: int) -> None:
    print_section("X must be one-hot here, not the bigram table of the 5-token example")
    x = bigram()
    _, p = learn(seed, x)
    gap = (x[0, 1] - x[1, 1]).abs().max().item()
    print_text(f"""In the bigram table man and woman have the same row, → ordered (max|difference| = {gap:.0f}), so the two
        sentences look alike. The same head trained on it: the → chicken {p[0, 3, CHICKEN].item():.3f} after man,
        the → beef {p[1, 3, BEEF].item():.3f} after woman.""")
