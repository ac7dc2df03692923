"""Baseline text classifier that uses logistic regression on the presence of words and word pairs."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PENALTIES = (0.03, 0.3, 3.0)
"""Candidate L2 penalties, where λ·‖W‖²/2 is added to the summed loss. The best penalty is chosen on a held-out tenth
of the training texts."""
MIN_COUNT = 2
"""Minimum number of texts in which a feature must occur. A feature of only one text does not generalize."""


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class BagOfWords:
    """A logistic regression classifier that is fitted on construction. Call `predict` to classify texts."""

    def __init__(self, texts: Sequence[str], targets: Sequence[int], *, seed: int = 0) -> None:
        counts = Counter(feature for text in texts for feature in set(features(text)))
        vocabulary = sorted(feature for feature, n in counts.items() if n >= MIN_COUNT)
        self._feature_ids = {feature: number for number, feature in enumerate(vocabulary)}
        self._n_classes = max(targets) + 1
        order = np.random.default_rng(seed).permutation(len(texts))
        held_out, rest = order[: len(texts) // 10 or 1], order[len(texts) // 10 or 1 :]
        bags, classes = [self._bag(text) for text in texts], torch.tensor(targets, device=DEVICE)
        train_bags, held_out_bags = (
            _concatenate_bags([bags[i] for i in rest]),
            _concatenate_bags([bags[i] for i in held_out]),
        )

        def held_out_accuracy(penalty: float) -> float:
            bag, bias = self._fit(train_bags, classes[rest], penalty)
            return float((_logits(bag, bias, held_out_bags).argmax(-1) == classes[held_out]).float().mean())

        self.penalty = max(PENALTIES, key=held_out_accuracy)
        self._bag_weights, self._bias = self._fit(_concatenate_bags(bags), classes, self.penalty)

    def predict(self, texts: Sequence[str]) -> list[int]:
        return (
            _logits(self._bag_weights, self._bias, _concatenate_bags([self._bag(t) for t in texts])).argmax(-1).tolist()
        )

    @property
    def n_parameters(self) -> int:
        return self._bag_weights.weight.numel() + self._bias.numel()

    def _bag(self, text: str) -> list[int]:
        return sorted({self._feature_ids[feature] for feature in features(text) if feature in self._feature_ids})

    def _fit(self, bags: tuple[Tensor, Tensor], targets: Tensor, penalty: float) -> tuple[nn.EmbeddingBag, Tensor]:
        bag = nn.EmbeddingBag(max(1, len(self._feature_ids)), self._n_classes, mode="sum", device=DEVICE)
        nn.init.zeros_(bag.weight)
        bias = torch.zeros(self._n_classes, requires_grad=True, device=DEVICE)
        optimizer = torch.optim.LBFGS([bag.weight, bias], max_iter=60, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(_logits(bag, bias, bags), targets, reduction="sum")
            total = (loss + penalty / 2 * bag.weight.square().sum()) / len(targets)
            total.backward()
            return total

        optimizer.step(closure)
        return bag.requires_grad_(requires_grad=False), bias.detach()


def features(text: str) -> list[str]:
    """Return the lowercase words and punctuation marks of a text, and all adjacent pairs of them."""
    vocabulary = re.findall(r"\w+|[^\w\s]", text.lower())
    return [*vocabulary, *map(" ".join, pairwise(vocabulary))]


def _concatenate_bags(bags: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    starts = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])[:-1]]).astype(np.int64)
    numbers = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64)
    return numbers.to(DEVICE), torch.from_numpy(starts).to(DEVICE)


def _logits(bag: nn.EmbeddingBag, bias: Tensor, bags: tuple[Tensor, Tensor]) -> Tensor:
    return bag(*bags) + bias
