"""Lesson: how the residual stream of one token changes and receives information from another token."""

from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.config import GPTConfig
from qkv.inspection import ActivationRecord, Heatmap, intervene, mask_attention, plot_heatmaps, record
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.models import GPT

SENTENCE_WORDS = ("the", "animal", "did", "not", "cross", "because", "it", "was", "tired")
IDS = torch.arange(len(SENTENCE_WORDS))[None]
REPLACEMENT_ID = len(SENTENCE_WORDS)
"""Id of the token that replaces another token."""
SOURCE, TARGET = SENTENCE_WORDS.index("animal"), SENTENCE_WORDS.index("it")
N_LAYERS = 3
RESID_TAPS = [f"blocks.{layer}.resid_{part}" for layer in range(N_LAYERS) for part in ("pre", "mid", "post")]


def build_untrained_gpt(seed: int = 0) -> GPT:
    """Build an untrained GPT with three layers."""
    config = GPTConfig(
        vocab_size=len(SENTENCE_WORDS) + 1, context_length=16, d_model=32, n_heads=4, n_layers=N_LAYERS, init_std=0.3
    )
    return GPT(config, seed=seed).eval()


def record_residuals_and_sublayer_outputs(gpt: GPT, ids: Int[Tensor, "1 position"]) -> ActivationRecord:
    """Record the residual stream and the output of every sublayer."""
    with record(gpt, "blocks.*.resid_*", "blocks.*_out") as cache, torch.no_grad():
        gpt(ids)
    return cache


def residual_change_norms(gpt: GPT, *, replaced_position: int) -> Float[Tensor, "tap position"]:
    """Return how much each token's residual stream changes when the token at `replaced_position` is replaced.

    The result contains the norm of the change for each tap in `RESID_TAPS` (row) and each token (column).
    """
    replaced = IDS.clone()
    replaced[0, replaced_position] = REPLACEMENT_ID
    before, after = (
        record_residuals_and_sublayer_outputs(gpt, IDS),
        record_residuals_and_sublayer_outputs(gpt, replaced),
    )
    return torch.stack([(after[tap] - before[tap])[0].norm(dim=-1) for tap in RESID_TAPS])


def mask_edges_to_source(gpt: GPT, *, queries: list[int]) -> ExitStack:
    """Mask attention from the given queries to the key at `SOURCE` in every layer until the context exits."""
    stack = ExitStack()
    for query in queries:
        stack.enter_context(mask_attention(gpt, "blocks.*.attention", query=query, key=SOURCE))
    return stack


def lesson(seed: int) -> DrawFigure:
    gpt = build_untrained_gpt(seed)
    cache = record_residuals_and_sublayer_outputs(gpt, IDS)
    print_section(f"What each sublayer of an untrained GPT adds to the residual stream of “{SENTENCE_WORDS[TARGET]}”")
    start = cache[RESID_TAPS[0]][0, TARGET]
    rows, total = [("token + position", start.norm().item(), start.norm().item(), 1.0)], start
    for layer in range(N_LAYERS):
        for part in ("attention", "feed_forward"):
            output = cache[f"blocks.{layer}.{part}_out"][0, TARGET]
            total = total + output
            cosine = torch.cosine_similarity(total, start, dim=0).item()
            rows.append((f"block {layer}, {part}", output.norm().item(), total.norm().item(), cosine))
    print_table(["sublayer", "‖output‖", "‖stream‖ afterwards", "cosine with the embedding"], rows, digits=3)
    difference = (total - cache[RESID_TAPS[-1]][0, TARGET]).abs().max().item()
    print_text(
        f"The sum of the embedding and all sublayer outputs is the final residual stream: max|difference| = "
        f"{difference:.1g}."
    )

    unmasked = residual_change_norms(gpt, replaced_position=SOURCE)
    print_section(
        f"Change in the residual stream of “{SENTENCE_WORDS[TARGET]}” if “{SENTENCE_WORDS[SOURCE]}” is replaced"
    )
    with mask_edges_to_source(gpt, queries=[TARGET]):
        direct_edge_masked = residual_change_norms(gpt, replaced_position=SOURCE)
    with mask_edges_to_source(gpt, queries=list(range(SOURCE + 1, len(SENTENCE_WORDS)))):
        all_edges_masked = residual_change_norms(gpt, replaced_position=SOURCE)
    with intervene(gpt, {"blocks.*.attention_out": 0.0}):
        attention_ablated = residual_change_norms(gpt, replaced_position=SOURCE)
    later_word_replaced = residual_change_norms(gpt, replaced_position=len(SENTENCE_WORDS) - 1)
    runs = (unmasked, direct_edge_masked, all_edges_masked, attention_ablated, later_word_replaced)
    print_table(
        ["tap", "unmasked", "it→animal masked", "all→animal masked", "no attention", "later word"],
        [(tap, *(run[i, TARGET].item() for run in runs)) for i, tap in enumerate(RESID_TAPS)],
        digits=3,
    )
    print_text("""The residual stream of *it* first changes at resid_mid of block 0, after the first attention layer.
        Only attention moves information between tokens; feed-forward layers, norms and residual connections act on each
        token separately.""")
    print_text(f"""If attention from *it* to *animal* is masked in all layers, information about *animal* still reaches
        *it* indirectly: the change at the last tap is {direct_edge_masked[-1, TARGET].item():.3f}. Other tokens attend
        to *animal*, and *it* attends to those tokens in a later layer. If attention from all later tokens to *animal*
        is masked, or if attention is ablated, the residual stream of *it* does not change at all (0).""")
    print_text(f"""In the last column, the later word “{SENTENCE_WORDS[-1]}” is replaced instead of *animal*. Because of
        the causal mask, replacing a later word has no effect on *it*.""")
    tap_labels = [tap.removeprefix("blocks.").replace(".resid_", " ") for tap in RESID_TAPS]
    heatmaps = [
        Heatmap(
            matrix=run,
            rows=tap_labels,
            columns=SENTENCE_WORDS,
            title=title,
            row_axis="block and tap",
            column_axis="token",
        )
        for run, title in ((unmasked, "unmasked"), (direct_edge_masked, "edge it→animal masked in every block"))
    ]
    return lambda: plot_heatmaps(
        *heatmaps, title="Change in the residual stream of every token if “animal” is replaced"
    )
