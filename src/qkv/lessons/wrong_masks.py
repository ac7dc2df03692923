"""What goes wrong when the mask is multiplied in, or applied after the softmax?"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

from qkv.inspection import Heatmap, intervene, plot_heatmaps
from qkv.lessons import sentences
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure, Figure
from qkv.nn import CAUSAL, masked_softmax

N_STEPS = 200
N = 4
TOKENS = [str(i) for i in range(N)]


def _visible(scores: Tensor) -> Tensor:
    return CAUSAL.to_dense(scores.shape[-2], scores.shape[-1], scores.device)[0, 0]


def _renormalised(weights: Tensor) -> Tensor:
    kept = weights * _visible(weights)
    return kept / kept.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Masking:
    """A way to hide the future, as what it does to scores and to weights."""

    name: str
    to_scores: Callable[[Tensor], Tensor] = lambda scores: scores
    to_weights: Callable[[Tensor], Tensor] = lambda weights: weights

    def weights(self, scores: Tensor) -> Tensor:
        return self.to_weights(masked_softmax(self.to_scores(scores)[None, None])[0, 0])


WAYS = (
    Masking("right: −∞ added before the softmax", lambda s: s.masked_fill(~_visible(s), -inf)),
    Masking("(i) scores × 0/1, then softmax", lambda s: s * _visible(s)),
    Masking("(ii) scores × −∞, then softmax", lambda s: s * torch.where(_visible(s), 1.0, -inf)),
    Masking("(iii) softmax, then × 0/1", to_weights=lambda w: w * _visible(w)),
    Masking("(iii) renormalised", to_weights=_renormalised),
)


def lesson(seed: int) -> DrawFigure:
    scores = torch.randn(N, N)
    print_section("Scores of four tokens, a row for each query; query t may see keys 0 … t")
    print_matrix(scores, rows=TOKENS, columns=TOKENS)
    for way in WAYS:
        print_section(f"Weights, {way.name}")
        weights = way.weights(scores)
        print_matrix(torch.cat((weights, weights.sum(-1, keepdim=True)), 1), rows=TOKENS, columns=[*TOKENS, "row sum"])
    print_slide_error("""A multiplies scores by a 0/1 mask before the softmax (i): a masked score becomes 0, not −∞, and e⁰ = 1
        is a good share. E draws an element-wise product with −∞ (ii): a negative score becomes +∞, and its row
        NaN. Both mean the first table, where −∞ is added.""")
    _leaks()
    losses = _train_all(seed)
    _judge(losses)
    return lambda: _draw(scores, losses)


def _leaks() -> None:
    print_section("Does query 1 notice another token at place 3, which it must not see?")
    scores, values = torch.randn(N, N), torch.randn(N, 2)
    other_scores, other_values = scores.clone(), values.clone()
    other_scores[:, 3], other_values[3] = torch.randn(N), torch.randn(2)
    moved = [(way.weights(other_scores) @ other_values - way.weights(scores) @ values)[1] for way in WAYS]
    print_table(
        ["", "the result of query 1 moves by"],
        [(way.name, step.norm().item()) for way, step in zip(WAYS, moved, strict=True)],
    )
    print_text("""Masked after the softmax (iii), the hidden keys get no weight, but they have already taken their share of
        the sum: how small a row is tells about the future. Renormalised, that is gone, and the weights are the
        right ones.""")


def _train_all(seed: int) -> list[tuple[str, float, float]]:
    losses = []
    for way in WAYS:
        torch.manual_seed(seed)
        model = sentences.tiny_gpt(causal=False, seed=seed)
        with intervene(model, {"*.attention.scores": way.to_scores, "*.attention.weights": way.to_weights}):
            in_training = sentences.train(model, n_steps=N_STEPS)[-20:]
            in_use = sentences.loss_in_use(model, sentences.draw(500))
        losses.append((way.name, sum(in_training) / len(in_training), in_use))
    return losses


def _judge(losses: list[tuple[str, float, float]]) -> None:
    print_section("E: masking after the softmax “may just work!” Let us train with each")
    print_text(f"""The tiny GPT and the endless sentences of `qkv lesson no-causal-mask`, {N_STEPS} steps. The best an honest model
        can do is {sentences.BEST_LOSS:.4f} nats a word. In use the later words are not there.""")

    def verdict(in_training: float, in_use: float) -> str:
        if isnan(in_training):
            return "dead at the first step"
        return "sees the future" if in_use > in_training + 0.1 else "honest"

    print_table(["", "loss in training", "loss in use", ""], [(*row, verdict(*row[1:])) for row in losses])
    after, right = losses[3], losses[0]
    print_text(f"""It does not just work: the loss of {after[1]:.2f} in training is below what can be known honestly, and in
        use it is {after[2]:.2f} against {right[2]:.2f}. The model has learnt to read the next word from how small its
        rows are. Renormalised it works, as it must: its weights are the right ones.""")


def _draw(scores: Tensor, losses: list[tuple[str, float, float]]) -> Figure:
    maps = []
    for way, (name, in_training, in_use) in zip(WAYS, losses, strict=True):
        weights = way.weights(scores)
        rows = [f"{i} (Σ {total:.2f})" for i, total in enumerate(weights.sum(-1).tolist())]
        title = f"{name}\nloss {in_training:.2f} in training, {in_use:.2f} in use"
        maps.append(Heatmap(matrix=weights, rows=rows, columns=TOKENS, title=title, row_axis="query (row sum)"))
    return plot_heatmaps(*maps, title="One right mask, three wrong ones, and the repair: attention weights of four tokens")
