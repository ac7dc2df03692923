"""Lesson: GPT uses a block with a causal mask, and BERT uses the same block without a mask."""

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


def build_untrained_gpt(*, causal: bool, seed: int = 0) -> GPT:
    """Build a GPT with or without a causal mask. Its weights depend only on the seed."""
    return GPT(CONFIG.replace(causal=causal), seed=seed).eval()


def first_head_attention_weights(*, causal: bool, seed: int = 0) -> Float[Tensor, "query key"]:
    model = build_untrained_gpt(causal=causal, seed=seed)
    with record(model, "blocks.0.attention.weights") as cache, torch.no_grad():
        model(IDS)
    return cache["blocks.0.attention.weights"][0, 0]


def logit_change_norms(*, causal: bool, seed: int = 0) -> Float[Tensor, "replaced_token position"]:
    """Return the norm of the change in the logits at each position (column) when one token (row) is replaced."""
    model = build_untrained_gpt(causal=causal, seed=seed)
    rows = []
    with torch.no_grad():
        before = model(IDS)[0]
        for changed in range(IDS.shape[1]):
            ids = IDS.clone()
            ids[0, changed] = 5
            rows.append((model(ids)[0] - before).norm(dim=-1))
    return torch.stack(rows)


def unmasked_gpt_and_bert_difference(seed: int = 0) -> float:
    """Compute the largest difference between the hidden states of a BERT and an unmasked GPT with equal weights."""
    config = BERTConfig(
        vocab_size=6, context_length=8, d_model=32, n_heads=1, n_layers=1, activation=Activation.GELU_TANH,
        norm_position=NormPosition.PRE, norm_eps=CONFIG.norm_eps, embedding_norm=False, final_norm=True,
        pooler=False,
    )  # fmt: skip
    model, bert = build_untrained_gpt(causal=False, seed=seed), BERT(config).eval()
    bert.load_state_dict(model.state_dict(), strict=False)
    assert bert.embedding.segment is not None
    torch.nn.init.zeros_(bert.embedding.segment.weight)  # GPT has no segment embedding
    with torch.no_grad():
        return (bert(IDS) - model.hidden_states(IDS)).abs().max().item()


def lesson(seed: int) -> DrawFigure:
    causal_weights, bidirectional_weights = (
        first_head_attention_weights(causal=causal, seed=seed) for causal in (True, False)
    )
    print_section("One block with and without a causal mask")
    sizes = [
        sum(p.numel() for p in build_untrained_gpt(causal=causal, seed=seed).blocks.parameters())
        for causal in (True, False)
    ]
    print_table(["", "causal: GPT", "bidirectional: BERT"], [
        ("setting", "causal=True", "causal=False"),
        ("parameters of the block", f"{sizes[0]:,}", f"{sizes[1]:,}"),
        ("visible positions", "current and earlier", "all"),
        ("training targets", "the next word at every position", "the masked words (15%)"),
        (f"predictions for these {len(SENTENCE)} words", str(len(SENTENCE)), f"{0.15 * len(SENTENCE):.1f}"),
    ])  # fmt: skip
    print_section("Attention weights of an untrained block with a causal mask")
    positions = [str(t) for t in range(len(SENTENCE))]
    print_matrix(causal_weights, rows=LABELS, columns=positions)
    print_section("The same block without a mask")
    print_matrix(bidirectional_weights, rows=LABELS, columns=positions)

    print_section("Which outputs change if one input word is replaced?")
    has_changed = [logit_change_norms(causal=causal, seed=seed) > 1e-6 for causal in (True, False)]
    print_table(["replaced word", "causal: changed outputs", "bidirectional"], [
        (label, *(" ".join(str(i) for i in m[t].nonzero().flatten().tolist()) for m in has_changed))
        for t, label in enumerate(LABELS)
    ])  # fmt: skip
    print_text("""With the causal mask, each word only affects its own output and later outputs, so every output can be
        trained to predict the *next* word. Without the mask, every word affects all outputs, so the words to predict
        must be masked in the input.""")
    print_text(f"""GPT and BERT use the same block. With the weights and settings of the GPT, a BERT has the same hidden
        states as the GPT without a mask: max|difference| = {unmasked_gpt_and_bert_difference(seed):.1g}.""")
    masked = causal_weights.masked_fill(causal_weights == 0, float("-inf"))
    heatmaps = [
        Heatmap(matrix=m, rows=LABELS, columns=LABELS, title=title)
        for m, title in ((masked, "causal: GPT (−∞: masked)"), (bidirectional_weights, "bidirectional: BERT"))
    ]
    return lambda: plot_heatmaps(*heatmaps, title="The same block and weights: GPT and BERT differ only in the mask")
