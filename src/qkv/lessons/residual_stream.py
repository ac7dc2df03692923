"""How does one token's vector change on its way up, and how does another token get into it?"""

from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.config import GPTConfig
from qkv.inspection import ActivationRecord, Heatmap, intervene, mask_attention, plot_heatmaps, record
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.models import GPT

SENTENCE = ("the", "animal", "did", "not", "cross", "because", "it", "was", "tired")
IDS = torch.arange(len(SENTENCE))[None]
OTHER = len(SENTENCE)
"""The id put in another token's place."""
SOURCE, TARGET = SENTENCE.index("animal"), SENTENCE.index("it")
N_LAYERS = 3
PLACES = [f"blocks.{layer}.resid_{part}" for layer in range(N_LAYERS) for part in ("pre", "mid", "post")]


def model(seed: int = 0) -> GPT:
    """A new GPT: its weights are chance, its wiring is every GPT's."""
    config = GPTConfig(
        vocab_size=len(SENTENCE) + 1, context_length=16, d_model=32, n_heads=4, n_layers=N_LAYERS, init_std=0.3
    )
    return GPT(config, seed=seed).eval()


def streams(gpt: GPT, ids: Int[Tensor, "1 position"]) -> ActivationRecord:
    with record(gpt, "blocks.*.resid_*", "blocks.*_out") as trace, torch.no_grad():
        gpt(ids)
    return trace


def moved(gpt: GPT, *, at: int) -> Float[Tensor, "place position"]:
    """How far each token's stream moves at each place when the token at `at` is exchanged."""
    exchanged = IDS.clone()
    exchanged[0, at] = OTHER
    before, after = streams(gpt, IDS), streams(gpt, exchanged)
    return torch.stack([(after[place] - before[place])[0].norm(dim=-1) for place in PLACES])


def edges_cut(gpt: GPT, *, queries: list[int]) -> ExitStack:
    """Inside, none of these positions may look at SOURCE, in any layer."""
    stack = ExitStack()
    for query in queries:
        stack.enter_context(mask_attention(gpt, "blocks.*.attention", query=query, key=SOURCE))
    return stack


def lesson(seed: int) -> DrawFigure:
    gpt = model(seed)
    trace = streams(gpt, IDS)
    print_section(f"The stream of “{SENTENCE[TARGET]}”: what each part adds to one vector (a new GPT, random weights)")
    start = trace[PLACES[0]][0, TARGET]
    rows, total = [("token + position", start.norm().item(), start.norm().item(), 1.0)], start
    for layer in range(N_LAYERS):
        for part in ("attention", "feed_forward"):
            write = trace[f"blocks.{layer}.{part}_out"][0, TARGET]
            total = total + write
            likeness = torch.cosine_similarity(total, start, dim=0).item()
            rows.append((f"block {layer}, {part}", write.norm().item(), total.norm().item(), likeness))
    print_table(["part", "‖what it adds‖", "‖stream‖ after it", "cosine with the start"], rows, digits=3)
    gap = (total - trace[PLACES[-1]][0, TARGET]).abs().max().item()
    print_text(f"Start plus all that was added is the stream that comes out on top: max|difference| = {gap:.1g}.")

    free = moved(gpt, at=SOURCE)
    print_section(f"Exchange “{SENTENCE[SOURCE]}” and watch the stream of “{SENTENCE[TARGET]}”")
    with edges_cut(gpt, queries=[TARGET]):
        direct = moved(gpt, at=SOURCE)
    with edges_cut(gpt, queries=list(range(SOURCE + 1, len(SENTENCE)))):
        every = moved(gpt, at=SOURCE)
    with intervene(gpt, {"blocks.*.attention_out": 0.0}):
        silent = moved(gpt, at=SOURCE)
    backwards = moved(gpt, at=len(SENTENCE) - 1)
    runs = (free, direct, every, silent, backwards)
    print_table(
        ["place", "free", "it→animal cut", "all→animal cut", "no attention", "later word"],
        [(place, *(run[i, TARGET].item() for run in runs)) for i, place in enumerate(PLACES)],
        digits=3,
    )
    print_text(f"""The stream is untouched until the first attention has written (resid_mid of block 0): only attention
        moves information between tokens; feed-forward, norms and sums work on one token alone. Cut the edge
        it→animal in all layers and the news still comes by detours ({direct[-1, TARGET].item():.3f} at the top),
        through tokens that read *animal* and are read by *it* a layer later. Cut every edge to *animal*, or silence
        attention, and nothing arrives: 0. Last column: a later
        word, “{SENTENCE[-1]}”, exchanged; it never arrives, the mask forbids it.""")
    short = [place.removeprefix("blocks.").replace(".residual_", " ") for place in PLACES]
    maps = [
        Heatmap(
            matrix=run, rows=short, columns=SENTENCE, title=title, row_axis="block and place", column_axis="stream of"
        )
        for run, title in ((free, "free"), (direct, "edge it→animal cut in every block"))
    ]
    return lambda: plot_heatmaps(*maps, title="“animal” exchanged: how far every token's residual stream moves")
