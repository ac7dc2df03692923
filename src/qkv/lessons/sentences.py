"""Random sentences such as “the cat sat on the mat” and a tiny GPT that learns within seconds to generate them."""

from math import log

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.tensors import Ids

SLOTS = (
    ("the",),
    ("cat", "dog", "bird", "mouse"),
    ("sat", "slept", "ran", "hid"),
    ("on", "under", "near", "behind"),
    ("the",),
    ("mat", "bed", "tree", "wall"),
    ("</s>",),
)
SENTENCE_VOCABULARY = tuple(dict.fromkeys(word for slot in SLOTS for word in slot))
_IDS = [torch.tensor([SENTENCE_VOCABULARY.index(word) for word in slot]) for slot in SLOTS]

BEST_LOSS = sum(log(len(slot)) for slot in SLOTS[1:]) / len(SLOTS[1:])
"""Entropy in nats per predicted token. Only a model that sees the target word can reach a lower loss."""


def sample_sentences(n: int) -> Ids:
    """Sample n sentences, with equal probability for all words that are allowed at a position."""
    return torch.stack([ids[torch.randint(len(ids), (n,))] for ids in _IDS], dim=1)


def ids_to_text(ids: Tensor) -> str:
    """Join the words of a sentence with spaces."""
    return " ".join(SENTENCE_VOCABULARY[i] for i in ids.tolist())


def tiny_gpt(*, causal: bool, seed: int) -> GPT:
    """Build a GPT with two layers of width 32."""
    # With an init_std of 0.02, as in GPT-2, such a narrow model learns nothing during the first hundred steps.
    config = GPTConfig(
        vocab_size=len(SENTENCE_VOCABULARY), context_length=len(SLOTS) - 1, d_model=32, n_heads=2, n_layers=2,
        causal=causal, init_std=0.1,
    )  # fmt: skip
    return GPT(config, seed=seed)


def train_gpt_on_sentences(model: GPT, *, n_steps: int) -> list[float]:
    """Train a GPT on random sentences and return the loss of every step.

    For “the cat sat on the mat”, the input is “the cat sat on the mat”, and the target is “cat sat on the mat </s>”.
    Training stops when the loss becomes NaN.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses: list[float] = []
    for _ in range(n_steps):
        loss = loss_in_training(model, sample_sentences(64))
        losses.append(loss.item())
        if torch.isnan(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def loss_in_training(model: GPT, ids: Ids) -> Tensor:
    """Compute the loss of all positions in one forward pass, as during training.

    The target at position t is also the input at position t + 1.
    """
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_in_generation(model: GPT, ids: Ids) -> float:
    """Compute the loss when the model receives only the preceding words, as during generation."""
    steps = [F.cross_entropy(model(ids[:, :n])[:, -1], ids[:, n]) for n in range(1, ids.shape[1])]
    return torch.stack(steps).mean().item()


@torch.no_grad()
def generate_sentences(model: GPT, n: int) -> Ids:
    """Sample n sentences from the model, word by word, starting with “the”."""
    ids = _IDS[0].expand(n, 1)
    for _ in SLOTS[1:]:
        probabilities = model(ids)[:, -1].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1)), dim=1)
    return ids


def valid_sentence_fraction(ids: Ids) -> float:
    """Return the fraction of sentences in which every word is one of the words allowed at its position."""
    is_valid = torch.stack([torch.isin(ids[:, i], slot) for i, slot in enumerate(_IDS)])
    return is_valid.all(0).float().mean().item()
