"""Do queries learn to stand along the vector 1? One head trained to count, with LayerNorm and without."""

import torch
from torch import nn
from torch.nn import functional as F

from qkv.nn import Attention, HeadConfig, LayerNorm, TokenEmbedding, init_weights
from qkv.tensors import Ids, Logits

N_CLASSES, D, N = 10, 8, 31


class Counter(nn.Module):
    """Which token is the most frequent of its sequence? Every position is asked; to know, it must look at all."""

    def __init__(self, *, normed: bool, seed: int) -> None:
        super().__init__()
        self.token = TokenEmbedding(N_CLASSES, D)
        self.norm = LayerNorm(D) if normed else nn.Identity()
        self.attention = Attention(D, HeadConfig.split(D, 1), bias=False)
        self.answer = nn.Linear(D, N_CLASSES)
        init_weights(self, std=0.5, seed=seed)

    def forward(self, ids: Ids) -> Logits:
        return self.answer(self.attention(self.norm(self.token(ids))))

    def likeness(self) -> float:
        """|cosine| of a query with the vector 1, on average over tokens.

        Seen where LayerNorm's output is: q·(W_K x) = (W_Kᵀ q)·x, so it is W_Kᵀ q that is compared with 1.
        """
        with torch.no_grad():
            x = self.norm(self.token(torch.arange(N_CLASSES)[None]))
            queries = self.attention.q_proj(x)[0] @ self.attention.k_proj.weight
            return torch.cosine_similarity(queries, torch.ones_like(queries), dim=-1).abs().mean().item()


def train(*, normed: bool, seed: int, n_steps: int = 300) -> tuple[Counter, float]:
    """A trained counter, and its accuracy on the last batches."""
    counter = Counter(normed=normed, seed=seed)
    optimizer = torch.optim.Adam(counter.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    right = []
    for _ in range(n_steps):
        ids = torch.randint(N_CLASSES, (64, N), generator=generator)
        wanted = F.one_hot(ids, N_CLASSES).sum(1).argmax(-1)[:, None].expand(-1, N)
        logits = counter(ids)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        right.append((logits.argmax(-1) == wanted).float().mean().item())
    return counter, sum(right[-20:]) / 20


def by_chance(seed: int) -> float:
    """|cosine| of a random vector with 1, on average."""
    vectors = torch.randn(10_000, D, generator=torch.Generator().manual_seed(seed))
    return torch.cosine_similarity(vectors, torch.ones(D), dim=-1).abs().mean().item()
