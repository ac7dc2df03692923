"""What makes the same block GPT's or BERT's?"""

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import Activation, NormPosition
from qkv.config import BERTConfig, GPTConfig
from qkv.inspection import Heatmap, plot_heatmaps, record
from qkv.lessons.console import print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.models import BERT, GPT

SENTENCE = ["the", "cat", "sat", "on", "the", "mat"]
IDS = torch.tensor([[0, 1, 2, 3, 0, 4]])
LABELS = [f"{t} {word}" for t, word in enumerate(SENTENCE)]
CONFIG = GPTConfig(vocab_size=6, context_length=8, d_model=32, n_heads=1, n_layers=1, init_std=0.3)


def gpt(*, mask: bool, seed: int = 0) -> GPT:
    """The same weights for the same seed; `mask` is the one switch."""
    return GPT(CONFIG.replace(causal=mask), seed=seed).eval()


def weights(*, mask: bool, seed: int = 0) -> Float[Tensor, "query key"]:
    model = gpt(mask=mask, seed=seed)
    with record(model, "blocks.0.attention.weights") as trace, torch.no_grad():
        model(IDS)
    return trace["blocks.0.attention.weights"][0, 0]


def influence(*, mask: bool, seed: int = 0) -> Float[Tensor, "changed position"]:
    """How far each position's logits move when the token at another is changed; row: which was changed."""
    model = gpt(mask=mask, seed=seed)
    rows = []
    with torch.no_grad():
        before = model(IDS)[0]
        for changed in range(IDS.shape[1]):
            ids = IDS.clone()
            ids[0, changed] = 5
            rows.append((model(ids)[0] - before).norm(dim=-1))
    return torch.stack(rows)


def as_bert(seed: int = 0) -> float:
    """max|BERT's states − GPT's without mask|, the block's weights being the same ones."""
    config = BERTConfig(
        vocab_size=6, context_length=8, d_model=32, n_heads=1, n_layers=1, activation=Activation.GELU_TANH,
        norm_position=NormPosition.PRE, norm_eps=CONFIG.norm_eps, embedding_norm=False, final_norm=True,
        pooler=False,
    )  # fmt: skip
    model, bert = gpt(mask=False, seed=seed), BERT(config).eval()
    bert.load_state_dict(model.state_dict(), strict=False)
    assert bert.embedding.segment is not None
    torch.nn.init.zeros_(bert.embedding.segment.weight)  # GPT knows no sentence A or B
    with torch.no_grad():
        return (bert(IDS) - model.hidden_states(IDS)).abs().max().item()


def lesson(seed: int) -> DrawFigure:
    on, off = (weights(mask=mask, seed=seed) for mask in (True, False))
    print_section("One block, one switch")
    sizes = [sum(p.numel() for p in gpt(mask=mask, seed=seed).blocks.parameters()) for mask in (True, False)]
    print_table(["", "mask on: GPT", "mask off: BERT"], [
        ("setting", "causal=True", "causal=False"),
        ("parameters of the block", f"{sizes[0]:,}", f"{sizes[1]:,}"),
        ("who is seen", "oneself and the past", "everyone"),
        ("what it is trained to say", "the next word, everywhere", "the hidden words, 15 %"),
        (f"predictions from these {len(SENTENCE)} words", str(len(SENTENCE)), f"{0.15 * len(SENTENCE):.1f}"),
    ])  # fmt: skip
    print_section("Attention weights of a new block (random weights), mask on")
    places = [str(t) for t in range(len(SENTENCE))]
    print_matrix(on, rows=LABELS, columns=places)
    print_section("The same block, mask off")
    print_matrix(off, rows=LABELS, columns=places)

    print_section("Which outputs move when one input word is changed?")
    moves = [influence(mask=mask, seed=seed) > 1e-6 for mask in (True, False)]
    print_table(["changed word", "mask on: outputs that move", "mask off"], [
        (label, *(" ".join(str(i) for i in m[t].nonzero().flatten().tolist()) for m in moves))
        for t, label in enumerate(LABELS)
    ])  # fmt: skip
    print_text("""On: a word moves its own output and later ones, so each output may be asked for the *next* word. Off: every
        word moves all outputs, its own neighbours' too, so words must be hidden before they are asked for.""")
    print_text(f"""And it is the same block: BERT built with GPT's weights and settings gives the same states as GPT with the
        mask off, max|difference| = {as_bert(seed):.1g}.""")
    grey = on.masked_fill(on == 0, float("-inf"))
    maps = [
        Heatmap(matrix=m, rows=LABELS, columns=LABELS, title=title)
        for m, title in ((grey, "mask on: GPT (−∞: may not look)"), (off, "mask off: BERT"))
    ]
    return lambda: plot_heatmaps(*maps, title="One block, the same weights: the mask alone makes it GPT's or BERT's")
