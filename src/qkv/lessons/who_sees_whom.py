"""Lesson: which positions can attend to which in an encoder, a decoder and cross-attention."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.inspection import new_figure
from qkv.lessons import wirings
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, DrawFigure, Figure, style_and_label_axes
from qkv.lessons.wirings import IDS, REPLACEMENT_ID
from qkv.models import Seq2Seq
from qkv.nn import CAUSAL, Mask, Source

SOURCE_WORDS = ("el", "gato", "gris", "se", "sentó")
TARGET_WORDS = ("<bos>", "the", "gray", "cat", "sat")

StateChangeNorms = Float[Tensor, "query key"]


def state_changes_by_replaced_token(seq2seq: Seq2Seq, *, decoder: bool) -> StateChangeNorms:
    """Return the norm of the change in each final hidden state (row) when one token (column) is replaced."""

    def final_states(ids: Int[Tensor, "1 position"]) -> Float[Tensor, "query d"]:
        return seq2seq.hidden_states(ids, seq2seq.encode(IDS))[0] if decoder else seq2seq.encode(ids).states[0]

    columns = []
    with torch.no_grad():
        for key in range(IDS.shape[1]):
            replaced = IDS.clone()
            replaced[0, key] = REPLACEMENT_ID
            columns.append((final_states(replaced) - final_states(IDS)).norm(dim=-1))
    return torch.stack(columns, dim=1)


def decoder_changes_by_encoder_state(seq2seq: Seq2Seq, mask: Mask | None = None) -> StateChangeNorms:
    """Return the norm of the change in each final decoder state (row) when one encoder state (column) is replaced."""
    columns = []
    with torch.no_grad():
        states = seq2seq.encode(IDS).states
        before = seq2seq.hidden_states(IDS, Source(states=states, mask=mask))[0]
        for key in range(IDS.shape[1]):
            replaced = states.clone()
            replaced[0, key] = torch.randn_like(replaced[0, key])
            columns.append((seq2seq.hidden_states(IDS, Source(states=replaced, mask=mask))[0] - before).norm(dim=-1))
    return torch.stack(columns, dim=1)


def buggy_lecture_c_cross_mask(causal: Int[Tensor, "query key"], mask: Int[Tensor, " query"] | None = None) -> Tensor:
    """Build the cross-attention mask exactly like the decoder code in lecture C, including its bug."""
    if mask is not None:
        padding_mask = torch.minimum(mask[None, :], causal)
    return padding_mask  # pyright: ignore[reportPossiblyUnboundVariable]


def lesson(seed: int) -> DrawFigure:
    seq2seq = wirings.build_float64_seq2seq(seed)
    encoder, decoder = (state_changes_by_replaced_token(seq2seq, decoder=is_decoder) for is_decoder in (False, True))
    cross = decoder_changes_by_encoder_state(seq2seq)
    print_section("Measured: which final states change when one vector is replaced (●: changed, ·: unchanged)")
    _print_changes("Encoder self-attention: every token attends to every token", encoder, SOURCE_WORDS, SOURCE_WORDS)
    _print_changes("Decoder self-attention: token t attends to tokens up to t", decoder, TARGET_WORDS, TARGET_WORDS)
    _print_changes(
        "Cross-attention: every target position attends to all encoder states", cross, TARGET_WORDS, SOURCE_WORDS
    )
    incorrect = _print_lecture_c_cross_mask_error(seq2seq)
    print_section("Which encoder layer does each decoder layer attend to? (quiz in lecture E)")
    wirings.print_cross_attention_wiring(seq2seq)
    return lambda: _draw_visibility_markers(
        {
            "Encoder self-attention: all tokens": (encoder, SOURCE_WORDS, SOURCE_WORDS),
            "Decoder self-attention: tokens up to t": (decoder, TARGET_WORDS, TARGET_WORDS),
            "Cross-attention: all source tokens": (cross, TARGET_WORDS, SOURCE_WORDS),
            "Cross-attention in lecture C's code: incorrect": (incorrect, TARGET_WORDS, SOURCE_WORDS),
        }
    )


def _print_lecture_c_cross_mask_error(seq2seq: Seq2Seq) -> StateChangeNorms:
    print_section("The cross-attention mask in the decoder code of lecture C")
    n = IDS.shape[1]
    causal = CAUSAL.to_dense(n, n, IDS.device)[0, 0].int()
    visible = buggy_lecture_c_cross_mask(causal, torch.ones(n, dtype=torch.int))
    incorrect = decoder_changes_by_encoder_state(seq2seq, Mask(dense=visible.bool()[None, None]))
    _print_changes(
        "Cross-attention with this mask: target t only attends to source positions up to t",
        incorrect,
        TARGET_WORDS,
        SOURCE_WORDS,
    )
    print_slide_error("""The code uses min(padding, causal) as the cross-attention mask, so target position t only
        attends to source positions ≤ t. This contradicts the text of lecture C, which says that each decoder position
        attends to all encoder positions. The mask also has shape T×T, so it only works if the source and the target
        have the same length. The correct mask is the padding mask of the source.""")
    print_text("""This bug can go unnoticed during training. The first encoder state contains information from all
        source words, so even the first target position, which only attends to this state, has access to every source
        word.""")
    try:
        buggy_lecture_c_cross_mask(causal)
    except UnboundLocalError as error:
        print_slide_error(
            f"If no mask is passed, padding_mask is undefined, and the code raises {type(error).__name__}: {error}."
        )
    return incorrect


def _print_changes(title: str, changes: StateChangeNorms, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
    lines = zip(rows, changes.tolist(), strict=True)
    print_text(f"{title}.")
    print_table(["", *columns], [(row, *("●" if cell > 0 else "·" for cell in line)) for row, line in lines])


def _draw_visibility_markers(panels: dict[str, tuple[StateChangeNorms, tuple[str, ...], tuple[str, ...]]]) -> Figure:
    figure = new_figure(width=9.0, height=8.0)
    for axes, (title, (changes, rows, columns)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for is_visible, marker, size, color in ((True, "o", 160, BLUE), (False, "x", 30, "0.6")):
            i, j = ((changes > 0) == is_visible).nonzero().T
            axes.scatter(j.numpy(), i.numpy(), marker=marker, s=size, color=color)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.margins(0.12)
        axes.invert_yaxis()
        style_and_label_axes(axes, title=title, x="key", y="query")
    figure.suptitle("Which positions attend to which (●: yes, ×: no), measured by replacing one vector")
    return figure
