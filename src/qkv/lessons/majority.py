"""A single attention head trained to predict the most frequent token, with and without LayerNorm."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from qkv.models.stack import init_weights
from qkv.nn import Attention, HeadConfig, TokenEmbedding
from qkv.nn.norm import LayerNorm
from qkv.tensors import Ids, Logits

N_CLASSES, D, N = 10, 8, 31


class MajorityTokenClassifier(nn.Module):
    """A classifier that predicts the most frequent token of the sequence at every position.

    This task requires attention to all tokens.
    """

    def __init__(self, *, layer_norm: bool, seed: int) -> None:
        super().__init__()
        self.token = TokenEmbedding(N_CLASSES, D)
        self.norm = LayerNorm(D) if layer_norm else nn.Identity()
        self.attention = Attention(D, HeadConfig.split(D, 1), bias=False)
        self.classifier = nn.Linear(D, N_CLASSES)
        init_weights(self, std=0.5, seed=seed)

    def forward(self, ids: Ids) -> Logits:
        return self.classifier(self.attention(self.norm(self.token(ids))))

    def input_space_query_cosine_with_ones(self) -> float:
        """Return the mean |cosine| between a token's query and the vector of ones, averaged over all tokens.

        Because q·(W_K x) = (W_Kᵀ q)·x, the vector of ones is compared with W_Kᵀ q, which is in the same space as the
        output x of LayerNorm.
        """
        with torch.no_grad():
            x = self.norm(self.token(torch.arange(N_CLASSES)[None]))
            queries = self.attention.q_proj(x)[0] @ self.attention.k_proj.weight
            return torch.cosine_similarity(queries, torch.ones_like(queries), dim=-1).abs().mean().item()


class ClassifierAndTrainAccuracy(NamedTuple):
    """A trained classifier and its mean accuracy on the last 20 training batches."""

    classifier: MajorityTokenClassifier
    train_accuracy: float


def train_majority_classifier(*, layer_norm: bool, seed: int, n_steps: int = 300) -> ClassifierAndTrainAccuracy:
    """Train a classifier and return it with its mean accuracy on the last 20 batches."""
    model = MajorityTokenClassifier(layer_norm=layer_norm, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for _ in range(n_steps):
        ids = torch.randint(N_CLASSES, (64, N), generator=generator)
        targets = F.one_hot(ids, N_CLASSES).sum(1).argmax(-1)[:, None].expand(-1, N)
        logits = model(ids)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        accuracies.append((logits.argmax(-1) == targets).float().mean().item())
    return ClassifierAndTrainAccuracy(model, sum(accuracies[-20:]) / 20)


def random_cosine_with_ones(seed: int) -> float:
    """Return the mean absolute cosine similarity between a random vector and the vector of ones."""
    vectors = torch.randn(10_000, D, generator=torch.Generator().manual_seed(seed))
    return torch.cosine_similarity(vectors, torch.ones(D), dim=-1).abs().mean().item()
