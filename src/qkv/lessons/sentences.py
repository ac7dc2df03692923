"""What can a small model learn within seconds? Sentences like “the cat sat on the mat”, drawn without end."""

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
VOCABULARY = tuple(dict.fromkeys(word for slot in SLOTS for word in slot))
_IDS = [torch.tensor([VOCABULARY.index(word) for word in slot]) for slot in SLOTS]

BEST_LOSS = sum(log(len(slot)) for slot in SLOTS[1:]) / len(SLOTS[1:])
"""Nats a token: what is left open by the words before. Whoever gets below it has seen the word itself."""


def draw(n: int) -> Ids:
    """n sentences, each word of a slot as likely as the others."""
    return torch.stack([ids[torch.randint(len(ids), (n,))] for ids in _IDS], dim=1)


def words(ids: Tensor) -> str:
    return " ".join(VOCABULARY[i] for i in ids.tolist())


def tiny_gpt(*, causal: bool, seed: int) -> GPT:
    # The spread of 0.1 is for its small width: with GPT-2's 0.02 the first hundred steps do nothing.
    config = GPTConfig(
        vocab_size=len(VOCABULARY), context_length=len(SLOTS) - 1, d_model=32, n_heads=2, n_layers=2,
        causal=causal, init_std=0.1,
    )  # fmt: skip
    return GPT(config, seed=seed)


def train(model: GPT, *, n_steps: int) -> list[float]:
    """X = the cat sat on the mat, Y = cat sat on the mat </s>; the loss of every step. A NaN ends it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses: list[float] = []
    for _ in range(n_steps):
        loss = loss_in_training(model, draw(64))
        losses.append(loss.item())
        if torch.isnan(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def loss_in_training(model: GPT, ids: Ids) -> Tensor:
    """All positions in one pass: position t is asked for word t + 1, which stands in the input."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_in_use(model: GPT, ids: Ids) -> float:
    """The same question as it comes when writing: the later words are not there yet."""
    steps = [F.cross_entropy(model(ids[:, :n])[:, -1], ids[:, n]) for n in range(1, ids.shape[1])]
    return torch.stack(steps).mean().item()


@torch.no_grad()
def write(model: GPT, n: int) -> Ids:
    """n sentences, word by word from “the”, each drawn from the model's own probabilities."""
    ids = _IDS[0].expand(n, 1)
    for _ in SLOTS[1:]:
        chances = model(ids)[:, -1].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(chances, 1)), dim=1)
    return ids


def share_of_sentences(ids: Ids) -> float:
    """How many of these are sentences: a word of its slot at every place."""
    fits = torch.stack([torch.isin(ids[:, i], slot) for i, slot in enumerate(_IDS)])
    return fits.all(0).float().mean().item()
