"""Does a GPT learn to copy, and does it need positions for that?"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config import GPTConfig
from qkv.models import GPT
from tests.learning.practice import HELD_OUT, SEEDS, train_on_samples

N_WORDS = 7
AGAIN, VOCABULARY_SIZE = 0, 11


def draw_copies(generator: torch.Generator, n: int) -> Tensor:
    """Random words, AGAIN, and the same words."""
    words = torch.randint(AGAIN + 1, VOCABULARY_SIZE, (n, N_WORDS), generator=generator)
    return torch.cat((words, torch.full((n, 1), AGAIN), words), dim=1)


def taught_to_copy(seed: int, *, positions: str, n_layers: int = 1) -> GPT:
    config = GPTConfig(
        vocab_size=VOCABULARY_SIZE,
        context_length=2 * N_WORDS + 1,
        d_model=32,
        n_heads=4,
        n_layers=n_layers,
        positions=positions,
        init_std=0.05,
    )
    model = GPT(config, seed=seed)

    def loss(generator: torch.Generator) -> Tensor:
        ids = draw_copies(generator, 64)
        logits = model(ids[:, :-1])[:, N_WORDS:]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, N_WORDS + 1 :].flatten())

    train_on_samples(model, loss, n_steps=250, learning_rate=5e-3, seed=seed)
    return model


@torch.no_grad()
def fraction_copied(model: GPT) -> float:
    """Written token by token after AGAIN, with the cache."""
    ids = draw_copies(torch.Generator().manual_seed(HELD_OUT), 512)
    cache = model.new_cache(batch=ids.shape[0])
    written = [model(ids[:, : N_WORDS + 1], cache=cache)[:, -1:].argmax(-1)]
    while len(written) < N_WORDS:
        written.append(model(written[-1], cache=cache).argmax(-1))
    return (torch.cat(written, dim=1) == ids[:, N_WORDS + 1 :]).double().mean().item()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_gpt_with_positions_learns_to_copy(positions, seed):
    assert fraction_copied(taught_to_copy(seed, positions=positions)) >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gpt_of_one_layer_without_positions_cannot_copy(seed):
    """It sees a bag of words. A second layer would learn some order: the causal mask tells how many stand before."""
    assert fraction_copied(taught_to_copy(seed, positions="none")) <= 0.4
