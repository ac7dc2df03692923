"""The single attention head from lecture A, which both toy lessons train."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.models.stack import init_weights
from qkv.nn import CAUSAL, Attention, HeadConfig
from qkv.nn.positions import LearnedPositions
from qkv.tensors import Logits, Residual


class ToyHead(nn.Module):
    """An attention head with learned positions that maps T×V inputs to T×V logits.

    Q, K and V have width H, and their projections have no bias. The code on the slide omits the
    layer `attention.out_proj` (H×V).
    """

    def __init__(
        self, n_positions: int, vocab_size: int, *, seed: int, d_head: int = 20, with_positions: bool = True,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        heads = HeadConfig(n_heads=1, n_kv_heads=1, d_head=d_head, d_value=d_head)
        self.position = LearnedPositions(n_positions, vocab_size) if with_positions else None
        self.attention = Attention(vocab_size, heads, bias=False)
        self.mask = CAUSAL if causal else None
        # These are the standard deviations of Keras's default initialization. If the position embeddings are initially
        # as large as the token vectors, the head often learns to use only the positions.
        init_weights(self.attention, std=0.27, seed=seed)
        if self.position is not None:
            init_weights(self.position, std=0.03, seed=seed + 1)

    def forward(self, x: Residual) -> Logits:
        if self.position is not None:
            x = self.position(x, torch.arange(x.shape[1])[None])
        return self.attention(x, mask=self.mask)


def train_toy_head(
    head: ToyHead, x: Residual, target_probabilities: Float[Tensor, "batch position vocabulary"], *, n_steps: int = 500
) -> list[float]:
    """Minimize the head's cross-entropy with the target distributions, and return the loss of every step."""
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(x).flatten(0, 1), target_probabilities.flatten(0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
