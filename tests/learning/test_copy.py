"""A GPT learns to copy a sequence if it has positions."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config import GPTConfig
from qkv.models import GPT
from tests.learning.training_loop import HELD_OUT, SEEDS, train_on_samples

N_TOKENS = 7
COPY, VOCAB_SIZE = 0, 11


def sample_copies(generator: torch.Generator, n: int) -> Tensor:
    """Returns random tokens, COPY, and the same tokens."""
    tokens = torch.randint(COPY + 1, VOCAB_SIZE, (n, N_TOKENS), generator=generator)
    return torch.cat((tokens, torch.full((n, 1), COPY), tokens), dim=1)


def train_to_copy(seed: int, *, positions: str, n_layers: int = 1) -> GPT:
    config = GPTConfig(
        vocab_size=VOCAB_SIZE,
        context_length=2 * N_TOKENS + 1,
        d_model=32,
        n_heads=4,
        n_layers=n_layers,
        positions=positions,
        init_std=0.05,
    )
    model = GPT(config, seed=seed)

    def loss(generator: torch.Generator) -> Tensor:
        ids = sample_copies(generator, 64)
        logits = model(ids[:, :-1])[:, N_TOKENS:]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, N_TOKENS + 1 :].flatten())

    train_on_samples(model, loss, n_steps=250, learning_rate=5e-3, seed=seed)
    return model


@torch.no_grad()
def copy_accuracy(model: GPT) -> float:
    """Returns the accuracy of greedy decoding with a cache after COPY."""
    ids = sample_copies(torch.Generator().manual_seed(HELD_OUT), 512)
    cache = model.new_cache(batch=ids.shape[0])
    generated = [model(ids[:, : N_TOKENS + 1], cache=cache)[:, -1:].argmax(-1)]
    while len(generated) < N_TOKENS:
        generated.append(model(generated[-1], cache=cache).argmax(-1))
    return (torch.cat(generated, dim=1) == ids[:, N_TOKENS + 1 :]).double().mean().item()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_gpt_with_positions_learns_to_copy(positions, seed):
    assert copy_accuracy(train_to_copy(seed, positions=positions)) >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gpt_of_one_layer_without_positions_cannot_copy(seed):
    """Without positions, one layer sees a bag of tokens. A second layer could infer order from the causal mask."""
    assert copy_accuracy(train_to_copy(seed, positions="none")) <= 0.4
