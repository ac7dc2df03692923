"""Lesson: quiz questions from the lectures, answered by computation.

The module `quiz_cost` contains the questions about cost.
"""

import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.inspection import new_figure
from qkv.lessons import quiz_cost, wirings
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, style_and_label_axes
from qkv.models import GPT
from qkv.nn import CAUSAL, Attention, AttentionInputs, HeadConfig, TokenEmbedding
from qkv.nn.attention import masked_softmax

SMALL_CONFIG = GPTConfig(
    vocab_size=101,
    context_length=32,
    d_model=48,
    n_heads=4,
    n_layers=2,
    positions=PositionKind.SINUSOIDAL,
    attention_bias=False,
    norm_bias=False,
    feed_forward_bias=False,
    init_std=0.2,
)

QUIZ_OPTIONS = {
    "2. W_q and W_k (and W_v)": (".q_proj.", ".k_proj.", ".v_proj."),
    "7. W_o": (".out_proj.",),
    "5. the embedding matrix (also the unembedding)": ("embedding.",),
    "6. W_1 and W_2 in the FFN": (".up_proj.", ".down_proj."),
    "not on the slide: γ of the LayerNorms": ("norm.",),
}
"""Quiz options that name parameters, mapped to substrings of the corresponding parameter names in qkv."""


def trainable_parameters_by_quiz_option(model: GPT) -> dict[str, int]:
    """Count the trainable parameters that belong to each quiz option."""
    sizes = dict.fromkeys(QUIZ_OPTIONS, 0)
    for name, parameter in model.named_parameters():
        (option,) = (option for option, parts in QUIZ_OPTIONS.items() if any(part in name for part in parts))
        sizes[option] += parameter.numel() * parameter.requires_grad
    return sizes


def lesson(seed: int) -> DrawFigure:
    model = GPT(SMALL_CONFIG, seed=seed).eval()
    print_section("Lecture A: what is W·X if X is one-hot at j?")
    columns = TokenEmbedding(25, 10).weight.T
    difference = (columns @ torch.eye(25)[7] - columns[:, 7]).abs().max().item()
    print_text(f"""W·X is the column w_j of W, so the product is equivalent to a table lookup. For a 10×25 matrix W and
        j = 7, max|W·X − w_7| = {difference:.1g}.""")
    _print_trainable_parameters_by_option(model)
    _print_scaling_batching_masking_answers()
    _print_purpose_of_causal_mask(model)
    print_section("Lecture E: which encoder–decoder wiring is correct?")
    wirings.print_cross_attention_wiring(wirings.build_float64_seq2seq(seed))
    flops = quiz_cost.print_quiz_cost_answers(seed)
    return lambda: _draw_parameters_and_flops(trainable_parameters_by_quiz_option(model), flops)


def _print_trainable_parameters_by_option(model: GPT) -> None:
    print_section("Lecture E: what do we optimize when we train a Transformer?")
    assert model.embedding.position is not None
    print_table(
        ["option", "trainable parameters"],
        [
            ("1. X and y", 0),
            ("3. the softmax function", 0),
            ("4. sine/cos positional encodings", sum(p.numel() for p in model.embedding.position.parameters())),
            *trainable_parameters_by_quiz_option(model).items(),
            ("all", sum(p.numel() for p in model.parameters() if p.requires_grad)),
        ],
    )
    print_text("Answer: 2, 5, 6 and 7. The data, the softmax function and the sinusoidal encodings have no parameters.")
    shape = "×".join(str(size) for size in model.unembedding.weight.shape)
    print_slide_error(f"""Lecture E writes the logits as xW_E. However, W_E has shape V×d (here {shape}), so the
        logits are x·W_Eᵀ and have shape n×V.""")


def _print_scaling_batching_masking_answers() -> None:
    print_section("Lecture E: why √d? Does it work with batches? Why mask before the softmax?")
    rows = []
    for d in (4, 64, 1024):
        queries, keys = torch.randn(2, 1, 1, 256, d)
        for scale, name in ((1.0, "q·k"), (d**-0.5, "q·k/√d")):
            inputs = AttentionInputs(queries=queries, keys=keys, values=keys, scale=scale)
            rows.append((d, name, inputs.scores().var().item(), inputs.weights().amax(-1).mean().item()))
    print_table(["d", "scores", "variance", "largest of 256 weights"], rows, digits=3)
    print_text("""Dividing by √d keeps the variance of the scores close to 1 for every d. Without this scaling, a large
        d makes the softmax assign almost all of the weight to a single key.""")
    attention, x = Attention(48, HeadConfig.split(48, 4)), torch.randn(7, 11, 48)
    with torch.no_grad():
        one_by_one = torch.cat([attention(row[None]) for row in x])
        difference = (attention(x) - one_by_one).abs().max().item()
    print_text(f"""Attention works with batches. Processing 7 sequences as one batch (7×11×48) gives the same result as
        processing them one by one: max|difference| = {difference:.1g}.""")
    scores = torch.randn(1, 1, 5, 5)
    visible = CAUSAL.to_dense(5, 5, scores.device)
    before = masked_softmax(scores.masked_fill(~visible, float("-inf")))
    after = masked_softmax(scores) * visible
    difference = (after / after.sum(-1, keepdim=True) - before).abs().max().item()
    print_table(
        ["row", "sum, mask before softmax", "sum, mask after softmax"],
        [(i, before[0, 0, i].sum().item(), after[0, 0, i].sum().item()) for i in range(5)],
    )
    print_text(f"""If the mask is applied after the softmax, all rows except the last sum to less than 1. Dividing each
        row by its sum restores the correct weights (max|difference| = {difference:.0e}). `qkv lesson wrong-masks`
        trains models with each of these methods.""")


def _print_purpose_of_causal_mask(model: GPT) -> None:
    print_section("Lecture E: what is the purpose of attention masking during training?")
    ids = torch.randint(SMALL_CONFIG.vocab_size, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % SMALL_CONFIG.vocab_size
    bidirectional = GPT(SMALL_CONFIG.replace(causal=False)).eval()
    bidirectional.load_state_dict(model.state_dict())
    with torch.no_grad():
        changes = [(m(changed) - m(ids))[0, :8].abs().max().item() for m in (model, bidirectional)]
    print_table(
        ["", "causal mask", "no mask"],
        [
            ("A. FLOPs of one pass", *(quiz_cost.count_model_flops(m, ids) for m in (model, bidirectional))),
            ("B. largest change in logits 0–7 if tokens 8–11 change", *(f"{change:.1g}" for change in changes)),
        ],
    )
    print_text("""Answer: B. The mask hides later tokens. Answer A is incorrect because the matrix product still
        computes all scores, so the mask by itself does not save FLOPs. Answer C is incorrect because the mask does not
        highlight any tokens. The weights of the visible tokens depend only on their scores.""")


def _draw_parameters_and_flops(parameters_by_option: dict[str, int], flops: quiz_cost.FlopsBySourceLength) -> Figure:
    figure = new_figure(width=13.0, height=4.2)
    bars, lines = figure.subplots(1, 2)
    names = [name.split(". ")[-1].split(": ")[-1] for name in parameters_by_option]
    bars.bar_label(bars.barh(names, list(parameters_by_option.values()), color=BLUE), fmt="{:,.0f}", padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    style_and_label_axes(bars, title="Trainable parameters of a small GPT", x="trainable parameters", y="")
    quiz_cost.plot_flops_by_source_length(lines, flops, colors=(BLUE, ORANGE))
    figure.suptitle("Two quiz questions from lecture E: trainable parameters, and the cost of an encoder–decoder")
    return figure
