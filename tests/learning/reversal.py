"""The reversal task: the target is the source in reverse order."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAD, BEGIN, END = 0, 1, 2
VOCAB_SIZE = 13


@dataclass(frozen=True)
class Pairs:
    """Sources of different lengths with padding on the right, and their reversals."""

    source: Tensor
    target: Tensor
    """The reversal, then END, then PAD."""
    lengths: Tensor

    @property
    def source_attention_mask(self) -> Tensor:
        return self.source != PAD

    @property
    def prefix(self) -> Tensor:
        """Decoder input: BEGIN followed by the target without its last token."""
        return torch.cat((torch.full_like(self.target[:, :1], BEGIN), self.target[:, :-1]), dim=1)


def sample_pairs(generator: torch.Generator, *, n: int, shortest: int = 5, longest: int = 9) -> Pairs:
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator)
    tokens = torch.randint(END + 1, VOCAB_SIZE, (n, longest), generator=generator)
    positions = torch.arange(longest + 1)[None].expand(n, -1)
    reversed_positions = (lengths[:, None] - 1 - positions).clamp(min=0)
    target = tokens.gather(1, reversed_positions)
    target = target.masked_fill(positions == lengths[:, None], END).masked_fill(positions > lengths[:, None], PAD)
    return Pairs(tokens.masked_fill(positions[:, :-1] >= lengths[:, None], PAD), target, lengths)


def target_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def token_accuracy(predicted: Tensor, target: Tensor) -> float:
    """Returns the fraction of correct target tokens, including END."""
    is_target = target != PAD
    return (predicted == target)[is_target].double().mean().item()


def attention_accuracy(weights: Tensor, lengths: Tensor) -> Tensor:
    """Returns for each head how often it attends most to the source position of the next token."""
    positions = torch.arange(weights.shape[2])[None]
    is_target = positions < lengths[:, None]
    correct = weights.argmax(-1) == (lengths[:, None] - 1 - positions)[:, None]
    return (correct & is_target[:, None]).sum((0, 2)) / is_target.sum()
