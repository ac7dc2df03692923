"""The baseline every text classifier must beat: logistic regression on which words and pairs of words occur."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRENGTHS = (0.03, 0.3, 3.0)
"""Of the pull towards 0 (λ·‖W‖²/2 over the summed loss); the best on a held-out tenth is taken."""
MIN_COUNT = 2
"""A feature that one text alone has says nothing about another."""


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class BagOfWords:
    """`fit` on texts and class numbers, then `answers`."""

    def __init__(self, texts: Sequence[str], targets: Sequence[int], *, seed: int = 0) -> None:
        counts = Counter(feature for text in texts for feature in set(features(text)))
        kept = sorted(feature for feature, n in counts.items() if n >= MIN_COUNT)
        self._place = {feature: number for number, feature in enumerate(kept)}
        self._n_classes = max(targets) + 1
        order = np.random.default_rng(seed).permutation(len(texts))
        held, rest = order[: len(texts) // 10 or 1], order[len(texts) // 10 or 1 :]
        bags, classes = [self._bag(text) for text in texts], torch.tensor(targets, device=DEVICE)
        part, judged = _joined([bags[i] for i in rest]), _joined([bags[i] for i in held])

        def held_out(strength: float) -> float:
            bag, bias = self._fitted(part, classes[rest], strength)
            return float((_logits(bag, bias, judged).argmax(-1) == classes[held]).float().mean())

        self.strength = max(STRENGTHS, key=held_out)
        self._bag_weights, self._bias = self._fitted(_joined(bags), classes, self.strength)

    def answers(self, texts: Sequence[str]) -> list[int]:
        return _logits(self._bag_weights, self._bias, _joined([self._bag(t) for t in texts])).argmax(-1).tolist()

    @property
    def n_parameters(self) -> int:
        return self._bag_weights.weight.numel() + self._bias.numel()

    def _bag(self, text: str) -> list[int]:
        return sorted({self._place[feature] for feature in features(text) if feature in self._place})

    def _fitted(self, bags: tuple[Tensor, Tensor], targets: Tensor, strength: float) -> tuple[nn.EmbeddingBag, Tensor]:
        bag = nn.EmbeddingBag(max(1, len(self._place)), self._n_classes, mode="sum", device=DEVICE)
        nn.init.zeros_(bag.weight)
        bias = torch.zeros(self._n_classes, requires_grad=True, device=DEVICE)
        optimizer = torch.optim.LBFGS([bag.weight, bias], max_iter=60, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            missed = F.cross_entropy(_logits(bag, bias, bags), targets, reduction="sum")
            total = (missed + strength / 2 * bag.weight.square().sum()) / len(targets)
            total.backward()
            return total

        optimizer.step(loss)
        return bag.requires_grad_(requires_grad=False), bias.detach()


def features(text: str) -> list[str]:
    """Lower-cased words and signs, and each two that follow each other."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return [*words, *map(" ".join, pairwise(words))]


def _joined(bags: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    starts = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])[:-1]]).astype(np.int64)
    numbers = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64)
    return numbers.to(DEVICE), torch.from_numpy(starts).to(DEVICE)


def _logits(bag: nn.EmbeddingBag, bias: Tensor, bags: tuple[Tensor, Tensor]) -> Tensor:
    return bag(*bags) + bias
