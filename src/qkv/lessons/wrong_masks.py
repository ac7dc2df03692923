"""Lesson: multiplying scores by a causal mask, or applying the mask after the softmax, is incorrect."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.inspection import Heatmap, intervene, plot_heatmaps
from qkv.lessons import sentences
from qkv.lessons.console import print_matrix, print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure, Figure
from qkv.nn import CAUSAL
from qkv.nn.attention import masked_softmax

N_TRAINING_STEPS = 200
N = 4
TOKENS = [str(i) for i in range(N)]


def _causal_visibility(scores: Tensor) -> Tensor:
    return CAUSAL.to_dense(scores.shape[-2], scores.shape[-1], scores.device)[0, 0]


def _renormalize(weights: Tensor) -> Tensor:
    visible_weights = weights * _causal_visibility(weights)
    return visible_weights / visible_weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class MaskingMethod:
    """A method of hiding later tokens, defined by functions that transform the scores and the weights."""

    name: str
    to_scores: Callable[[Tensor], Tensor] = lambda scores: scores
    to_weights: Callable[[Tensor], Tensor] = lambda weights: weights

    def weights(self, scores: Tensor) -> Tensor:
        return self.to_weights(masked_softmax(self.to_scores(scores)[None, None])[0, 0])


class MethodLosses(NamedTuple):
    """The losses of a model that was trained with a masking method."""

    method_name: str
    training: float
    generation: float


METHODS = (
    MaskingMethod("correct: −∞ added before the softmax", lambda s: s.masked_fill(~_causal_visibility(s), -inf)),
    MaskingMethod("(i) scores × 0/1, then softmax", lambda s: s * _causal_visibility(s)),
    MaskingMethod("(ii) scores × −∞, then softmax", lambda s: s * torch.where(_causal_visibility(s), 1.0, -inf)),
    MaskingMethod("(iii) softmax, then × 0/1", to_weights=lambda w: w * _causal_visibility(w)),
    MaskingMethod("(iii) renormalized", to_weights=_renormalize),
)


def lesson(seed: int) -> DrawFigure:
    scores = torch.randn(N, N)
    print_section("Scores of four tokens, one row per query; query t may attend to keys 0 … t")
    print_matrix(scores, rows=TOKENS, columns=TOKENS)
    for method in METHODS:
        print_section(f"Attention weights – {method.name}")
        weights = method.weights(scores)
        print_matrix(torch.cat((weights, weights.sum(-1, keepdim=True)), 1), rows=TOKENS, columns=[*TOKENS, "row sum"])
    print_slide_error("""Lecture A multiplies the scores by a 0/1 mask before the softmax (i). A masked score then
        becomes 0 instead of −∞. Because e⁰ = 1, masked keys still receive considerable weight. Lecture E draws an
        element-wise product with −∞ (ii). If a masked score is negative, it becomes +∞, and the softmax of its row is
        NaN. What both lectures mean is the first method, which adds −∞ to the scores of masked keys.""")
    _print_output_changes_by_masked_token()
    losses = _train_and_measure_losses(seed)
    _print_training_and_generation_losses(losses)
    return lambda: _draw_weights_by_mask_method(scores, losses)


def _print_output_changes_by_masked_token() -> None:
    print_section("Does the token at position 3 affect query 1, which must not attend to it?")
    scores, values = torch.randn(N, N), torch.randn(N, 2)
    other_scores, other_values = scores.clone(), values.clone()
    other_scores[:, 3], other_values[3] = torch.randn(N), torch.randn(2)
    changes = [(method.weights(other_scores) @ other_values - method.weights(scores) @ values)[1] for method in METHODS]
    print_table(
        ["", "change in the output of query 1"],
        [(method.name, change.norm().item()) for method, change in zip(METHODS, changes, strict=True)],
    )
    print_text("""If the mask is applied after the softmax (iii), the masked keys have no weight, but they still
        contribute to the denominator of the softmax. The sum of each row therefore contains information about later
        tokens. Renormalization removes this information and gives the correct weights.""")


def _train_and_measure_losses(seed: int) -> list[MethodLosses]:
    losses = []
    for method in METHODS:
        torch.manual_seed(seed)
        model = sentences.tiny_gpt(causal=False, seed=seed)
        with intervene(model, {"*.attention.scores": method.to_scores, "*.attention.weights": method.to_weights}):
            in_training = sentences.train_gpt_on_sentences(model, n_steps=N_TRAINING_STEPS)[-20:]
            in_generation = sentences.loss_in_generation(model, sentences.sample_sentences(500))
        losses.append(MethodLosses(method.name, sum(in_training) / len(in_training), in_generation))
    return losses


def _print_training_and_generation_losses(losses: list[MethodLosses]) -> None:
    print_section("Training with each method (lecture E: masking after the softmax “may just work!”)")
    print_text(f"""For each method, the tiny GPT of `qkv lesson no-causal-mask` is trained on random sentences for
        {N_TRAINING_STEPS} steps. A model that does not see later words cannot reach a loss below
        {sentences.BEST_LOSS:.4f} nats per word. During generation, later words do not exist yet, so a model cannot use
        them.""")

    def verdict(in_training: float, in_generation: float) -> str:
        if isnan(in_training):
            return "NaN at the first step"
        return "uses later words" if in_generation > in_training + 0.1 else "correct"

    print_table(
        ["", "training loss", "loss in generation", ""],
        [(*row, verdict(row.training, row.generation)) for row in losses],
    )
    after_softmax, correct = losses[3], losses[0]
    print_text(f"""Masking after the softmax does not “just work”. The training loss of {after_softmax.training:.2f} is
        lower than possible without seeing later words, and the loss in generation is {after_softmax.generation:.2f},
        compared with {correct.generation:.2f} for the correct mask. The model has learned to infer the next word from
        the row sums. Renormalizing the weights fixes the problem: each row again sums to 1 and does not depend on later
        tokens.""")


def _draw_weights_by_mask_method(scores: Tensor, losses: list[MethodLosses]) -> Figure:
    heatmaps = []
    for method, (name, in_training, in_generation) in zip(METHODS, losses, strict=True):
        weights = method.weights(scores)
        rows = [f"{i} (Σ {total:.2f})" for i, total in enumerate(weights.sum(-1).tolist())]
        title = f"{name}\nloss {in_training:.2f} in training, {in_generation:.2f} in generation"
        heatmaps.append(Heatmap(matrix=weights, rows=rows, columns=TOKENS, title=title, row_axis="query (row sum)"))
    return plot_heatmaps(
        *heatmaps, title="Attention weights of four tokens with a correct mask and three incorrect ones"
    )
