"""The reverse task: a source of random tokens, and a target that says them backwards."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAD, BEGIN, END = 0, 1, 2
VOCABULARY_SIZE = 13


@dataclass(frozen=True)
class Pairs:
    """Sources of several lengths, padded on the right, and their reversals."""

    source: Tensor
    target: Tensor
    """The reversal, then END, then PAD."""
    lengths: Tensor

    @property
    def source_attention_mask(self) -> Tensor:
        return self.source != PAD

    @property
    def prefix(self) -> Tensor:
        """What a decoder reads while the target is asked of it: BEGIN, then the target but its last."""
        return torch.cat((torch.full_like(self.target[:, :1], BEGIN), self.target[:, :-1]), dim=1)


def draw_pairs(generator: torch.Generator, *, n: int, shortest: int = 5, longest: int = 9) -> Pairs:
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator)
    words = torch.randint(END + 1, VOCABULARY_SIZE, (n, longest), generator=generator)
    place = torch.arange(longest + 1)[None].expand(n, -1)
    mirrored = (lengths[:, None] - 1 - place).clamp(min=0)
    target = words.gather(1, mirrored)
    target = target.masked_fill(place == lengths[:, None], END).masked_fill(place > lengths[:, None], PAD)
    return Pairs(words.masked_fill(place[:, :-1] >= lengths[:, None], PAD), target, lengths)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def fraction_right(written: Tensor, target: Tensor) -> float:
    """Of all tokens asked for, END included."""
    asked = target != PAD
    return (written == target)[asked].double().mean().item()


def fraction_pointed(weights: Tensor, lengths: Tensor) -> Tensor:
    """For each head, how often the source position with the most weight is the one to be written next."""
    place = torch.arange(weights.shape[2])[None]
    asked = place < lengths[:, None]
    right = weights.argmax(-1) == (lengths[:, None] - 1 - place)[:, None]
    return (right & asked[:, None]).sum((0, 2)) / asked.sum()
