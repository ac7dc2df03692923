"""A BERT learns to predict a masked token from both sides."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config import BERTConfig
from qkv.models import BERT
from tests.learning.training_loop import HELD_OUT, SEEDS, train_on_samples

MASK, VOCAB_SIZE = 0, 11
LENGTH = 11


def sample_masked_sequences(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sequences of period 2 or 3 with one masked token, its position and the token."""
    period = torch.randint(2, 4, (n, 1), generator=generator)
    tokens = torch.randint(MASK + 1, VOCAB_SIZE, (n, 3), generator=generator)
    ids = tokens.gather(1, torch.arange(LENGTH)[None] % period)
    position = torch.randint(0, LENGTH, (n, 1), generator=generator)
    return ids.scatter(1, position, MASK), position, ids.gather(1, position)[:, 0]


def masked_logits(model: BERT, ids: Tensor, position: Tensor) -> Tensor:
    logits = model.masked_lm_logits(model(ids))
    return logits.gather(1, position[..., None].expand(-1, -1, VOCAB_SIZE))[:, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bert_learns_to_predict_a_masked_token_of_a_periodic_sequence(seed):
    config = BERTConfig(
        vocab_size=VOCAB_SIZE,
        context_length=LENGTH,
        d_model=64,
        n_heads=4,
        n_layers=2,
        d_ff=128,
        masked_lm_head=True,
        init_std=0.05,
    )
    model = BERT(config, seed=seed)

    def loss(generator: torch.Generator) -> Tensor:
        ids, position, token = sample_masked_sequences(generator, 64)
        return F.cross_entropy(masked_logits(model, ids, position), token)

    train_on_samples(model, loss, n_steps=400, learning_rate=3e-3, seed=seed)
    ids, position, token = sample_masked_sequences(torch.Generator().manual_seed(HELD_OUT), 1024)
    assert (masked_logits(model, ids, position).argmax(-1) == token).double().mean().item() >= 0.99
