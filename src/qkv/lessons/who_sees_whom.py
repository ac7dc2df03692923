"""What may each position see in an encoder, in a decoder, and from the one to the other?"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons import wirings
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, DrawFigure, Figure, label_axes
from qkv.lessons.wirings import IDS, OTHER
from qkv.models import Seq2Seq
from qkv.nn import CAUSAL, Mask, Source

SOURCE = ("el", "gato", "gris", "se", "sentó")
TARGET = ("<bos>", "the", "gray", "cat", "sat")

Moves = Float[Tensor, "looker seen"]


def of_tokens(seq2seq: Seq2Seq, *, decoder: bool) -> Moves:
    """How far each looker's top state moves when one token is exchanged: source by source, or target by target."""

    def top(ids: Int[Tensor, "1 position"]) -> Float[Tensor, "looker d"]:
        return seq2seq.hidden_states(ids, seq2seq.encode(IDS))[0] if decoder else seq2seq.encode(ids).states[0]

    columns = []
    with torch.no_grad():
        for seen in range(IDS.shape[1]):
            exchanged = IDS.clone()
            exchanged[0, seen] = OTHER
            columns.append((top(exchanged) - top(IDS)).norm(dim=-1))
    return torch.stack(columns, dim=1)


def of_states(seq2seq: Seq2Seq, mask: Mask | None = None) -> Moves:
    """How far each target position's top state moves when one of the encoder's output vectors is exchanged."""
    columns = []
    with torch.no_grad():
        states = seq2seq.encode(IDS).states
        before = seq2seq.hidden_states(IDS, Source(states=states, mask=mask))[0]
        for seen in range(IDS.shape[1]):
            exchanged = states.clone()
            exchanged[0, seen] = torch.randn_like(exchanged[0, seen])
            columns.append((seq2seq.hidden_states(IDS, Source(states=exchanged, mask=mask))[0] - before).norm(dim=-1))
    return torch.stack(columns, dim=1)


def slide_mask(causal: Int[Tensor, "query key"], mask: Int[Tensor, " query"] | None = None) -> Tensor:
    """The rule of C's decoder code for its cross-attention, with the hole it has."""
    if mask is not None:
        padding_mask = torch.minimum(mask[None, :], causal)
    return padding_mask  # pyright: ignore[reportPossiblyUnboundVariable]


def lesson(seed: int) -> DrawFigure:
    seq2seq = wirings.new_model(seed)
    encoder, decoder = (of_tokens(seq2seq, decoder=is_decoder) for is_decoder in (False, True))
    cross = of_states(seq2seq)
    print_section("Measured: exchange one vector, see whose top state moves (● moves, · does not)")
    _dots("Encoder self-attention: all tokens see all", encoder, SOURCE, SOURCE)
    _dots("Decoder self-attention: token t sees the prefix up to t", decoder, TARGET, TARGET)
    _dots("Cross-attention: every target position sees all of the encoder's states", cross, TARGET, SOURCE)
    wrong = _slide(seq2seq)
    print_section("Which encoder layer does each decoder layer read? (lecture E's quiz)")
    wirings.answer(seq2seq)
    return lambda: _draw(
        {
            "Encoder self-attention: all": (encoder, SOURCE, SOURCE),
            "Decoder self-attention: the prefix": (decoder, TARGET, TARGET),
            "Cross-attention: the whole source": (cross, TARGET, SOURCE),
            "Cross-attention by C's code: wrong": (wrong, TARGET, SOURCE),
        }
    )


def _slide(seq2seq: Seq2Seq) -> Moves:
    print_section("Lecture C's decoder code")
    n = IDS.shape[1]
    causal = CAUSAL.to_dense(n, n, IDS.device)[0, 0].int()
    rule = slide_mask(causal, torch.ones(n, dtype=torch.int))
    wrong = of_states(seq2seq, Mask(dense=rule.bool()[None, None]))
    _dots("Its cross-attention, computed", wrong, TARGET, SOURCE)
    print_slide_error("""it gives cross-attention min(padding, causal), so target t sees only source ≤ t, against C's own text:
        each position of the decoder attends to all positions of the encoder. The rule is also T×T, so it
        fits only where source and target are equally long. Right is the padding of the source alone.""")
    print_text("""The slip can go unnoticed in training: the encoder has mixed the whole source into its first state, so even
        the first target position hears of every source word, through that one vector.""")
    try:
        slide_mask(causal)
    except UnboundLocalError as error:
        print_slide_error(f"without a mask, padding_mask is undefined. Run, it says: {type(error).__name__}: {error}.")
    return wrong


def _dots(title: str, moves: Moves, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
    lines = zip(rows, moves.tolist(), strict=True)
    print_text(f"{title}:")
    print_table(["", *columns], [(row, *("●" if cell > 0 else "·" for cell in line)) for row, line in lines])


def _draw(panels: dict[str, tuple[Moves, tuple[str, ...], tuple[str, ...]]]) -> Figure:
    figure = new_figure(width=9.0, height=8.0)
    for axes, (title, (moves, rows, columns)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for sees, marker, size, colour in ((True, "o", 160, BLUE), (False, "x", 30, "0.6")):
            i, j = ((moves > 0) == sees).nonzero().T
            axes.scatter(j.numpy(), i.numpy(), marker=marker, s=size, color=colour)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.margins(0.12)
        axes.invert_yaxis()
        label_axes(axes, title=title, x="… sees this one", y="this position …")
    figure.suptitle("Who sees whom (● sees, × does not), measured by exchanging one vector")
    return figure
