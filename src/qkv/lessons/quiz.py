"""The lectures' quizzes, each answered by computing. Those about cost are in quiz_cost."""

import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.inspection import new_figure
from qkv.lessons import quiz_cost, wirings
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, label_axes
from qkv.models import GPT
from qkv.nn import CAUSAL, Attention, AttentionInputs, HeadConfig, TokenEmbedding, masked_softmax

SMALL = GPTConfig(
    vocab_size=101, context_length=32, d_model=48, n_heads=4, n_layers=2, positions=PositionKind.SINUSOIDAL,
    attention_bias=False, norm_bias=False, feed_forward_bias=False, init_std=0.2,
)  # fmt: skip

PARTS = {
    "2. W_q and W_k (and W_v)": (".q_proj.", ".k_proj.", ".v_proj."),
    "7. W_o": (".out_proj.",),
    "5. the embedding matrix (also the unembedding)": ("embedding.",),
    "6. W_1 and W_2 in the FFN": (".up_proj.", ".down_proj."),
    "not on the slide: γ of the LayerNorms": ("norm.",),
}
"""The slide's options that are parameters, and how their names here can be told."""


def trained(model: GPT) -> dict[str, int]:
    """How many numbers of each part ask for a gradient."""
    sizes = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        (part,) = (part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        sizes[part] += parameter.numel() * parameter.requires_grad
    return sizes


def lesson(seed: int) -> DrawFigure:
    model = GPT(SMALL, seed=seed).eval()
    print_section("A: if X is one-hot at j, what is W·X?")
    columns = TokenEmbedding(25, 10).weight.T
    gap = (columns @ torch.eye(25)[7] - columns[:, 7]).abs().max().item()
    print_text(f"Column w_j: for W 10×25 and j = 7, max|W·X − w_7| = {gap:.1g}. So the product is a look-up.")
    _what_is_trained(model)
    _attention_questions()
    _why_mask(model)
    print_section("E: which encoder–decoder wiring is right?")
    wirings.print_measured_wiring(wirings.build_seq2seq(seed))
    encoder_decoder = quiz_cost.answer(seed)
    return lambda: _draw(trained(model), encoder_decoder)


def _what_is_trained(model: GPT) -> None:
    print_section("E: what do we optimise when we train a Transformer?")
    assert model.embedding.position is not None
    print_table(["option", "numbers with requires_grad"], [
        ("1. X and y", 0), ("3. the softmax function", 0),
        ("4. sine/cos positional encodings", sum(p.numel() for p in model.embedding.position.parameters())),
        *trained(model).items(), ("all", sum(p.numel() for p in model.parameters() if p.requires_grad)),
    ])  # fmt: skip
    print_text("Answer: 2, 5, 6 and 7. Data, softmax and sinusoids have nothing to train.")
    shape = "×".join(str(size) for size in model.unembedding.weight.shape)
    print_slide_error(f"E writes the logits as xW_E. W_E is V×d (here {shape}), so they are x·W_Eᵀ, n×V.")


def _attention_questions() -> None:
    print_section("E: why √d? Does it batch? Why mask before the softmax?")
    rows = []
    for d in (4, 64, 1024):
        queries, keys = torch.randn(2, 1, 1, 256, d)
        for scale, name in ((1.0, "q·k"), (d**-0.5, "q·k/√d")):
            lookup = AttentionInputs(queries=queries, keys=keys, values=keys, scale=scale)
            rows.append((d, name, lookup.scores().var().item(), lookup.weights().amax(-1).mean().item()))
    print_table(["d", "scores", "variance", "largest of 256 weights"], rows, digits=3)
    print_text("Why √d: it keeps the variance at 1 for any d; without it the softmax picks one key.")
    attention, x = Attention(48, HeadConfig.split(48, 4)), torch.randn(7, 11, 48)
    with torch.no_grad():
        alone = torch.cat([attention(row[None]) for row in x])
        gap = (attention(x) - alone).abs().max().item()
    print_text(f"Batches: yes. 7 sequences at once (7×11×48) and one by one: max|difference| = {gap:.1g}.")
    scores = torch.randn(1, 1, 5, 5)
    visible = CAUSAL.to_dense(5, 5, scores.device)
    before = masked_softmax(scores.masked_fill(~visible, float("-inf")))
    after = masked_softmax(scores) * visible
    gap = (after / after.sum(-1, keepdim=True) - before).abs().max().item()
    print_table(["row", "sum, masked before", "sum, masked after"], [
        (i, before[0, 0, i].sum().item(), after[0, 0, i].sum().item()) for i in range(5)
    ])  # fmt: skip
    print_text(f"""Masked after the softmax the rows no longer sum to 1; divided by their sums they are right again
        (max|difference| {gap:.0e}). Lesson wrong-masks trains both.""")


def _why_mask(model: GPT) -> None:
    print_section("E: what is the point of attention masking during training?")
    ids = torch.randint(SMALL.vocab_size, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % SMALL.vocab_size
    free = GPT(SMALL.replace(causal=False)).eval()
    free.load_state_dict(model.state_dict())
    with torch.no_grad():
        moves = [(m(changed) - m(ids))[0, :8].abs().max().item() for m in (model, free)]
    print_table(["", "mask on", "mask off"], [
        ("A. operations of one pass", *(quiz_cost.flops(m, ids) for m in (model, free))),
        ("B. largest move of logits 0–7 when tokens 8–11 change", *(f"{move:.1g}" for move in moves)),
    ])  # fmt: skip
    print_text("""Answer: B. It keeps the future out. It saves no operations by itself (A; the plain product computes
        all scores), and it highlights nothing (C): among the tokens it allows, the scores decide.""")


def _draw(sizes: dict[str, int], encoder_decoder: dict[str, list[int]]) -> Figure:
    figure = new_figure(width=13.0, height=4.2)
    bars, lines = figure.subplots(1, 2)
    names = [name.split(". ")[-1].split(": ")[-1] for name in sizes]
    bars.bar_label(bars.barh(names, list(sizes.values()), color=BLUE), fmt="{:,.0f}", padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    label_axes(bars, title="What is trained (a small GPT)", x="numbers with a gradient", y="")
    quiz_cost.draw(lines, encoder_decoder, colours=(BLUE, ORANGE))
    figure.suptitle("Two quizzes of lecture E: what is trained, and what an encoder–decoder costs")
    return figure
