"""Does a BERT learn to fill in a hidden token from both sides?"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config import BERTConfig
from qkv.models import BERT
from tests.learning.practice import HELD_OUT, SEEDS, train_on_samples

HIDDEN, VOCABULARY_SIZE = 0, 11
LENGTH = 11


def draw_hidden(generator: torch.Generator, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of period 2 or 3 with one token hidden anywhere; where it stood; what it was."""
    period = torch.randint(2, 4, (n, 1), generator=generator)
    words = torch.randint(HIDDEN + 1, VOCABULARY_SIZE, (n, 3), generator=generator)
    ids = words.gather(1, torch.arange(LENGTH)[None] % period)
    where = torch.randint(0, LENGTH, (n, 1), generator=generator)
    return ids.scatter(1, where, HIDDEN), where, ids.gather(1, where)[:, 0]


def guesses(model: BERT, ids: Tensor, where: Tensor) -> Tensor:
    logits = model.masked_lm_logits(model(ids))
    return logits.gather(1, where[..., None].expand(-1, -1, VOCABULARY_SIZE))[:, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bert_learns_to_predict_a_masked_token_of_a_periodic_sequence(seed):
    config = BERTConfig(
        vocab_size=VOCABULARY_SIZE,
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
        ids, where, word = draw_hidden(generator, 64)
        return F.cross_entropy(guesses(model, ids, where), word)

    train_on_samples(model, loss, n_steps=400, learning_rate=3e-3, seed=seed)
    ids, where, word = draw_hidden(torch.Generator().manual_seed(HELD_OUT), 1024)
    assert (guesses(model, ids, where).argmax(-1) == word).double().mean().item() >= 0.99
