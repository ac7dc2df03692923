"""Small random models whose probabilities are far from even, in float64 so that two roads agree to the last id."""

import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT
from tests.agreement.families import shaken

VOCABULARY, CONTEXT = 23, 29


def small_gpt(*, seed: int = 0, vocabulary: int = VOCABULARY, context: int = CONTEXT, **settings) -> GPT:
    chosen = {"d_model": 12, "n_heads": 3, "n_layers": 2, "positions": PositionKind.ROTARY, **settings}
    return shaken(GPTConfig(vocab_size=vocabulary, context_length=context, **chosen), seed)


@torch.no_grad()
def rescored(model: GPT, prompt: list[int], new: list[int]) -> list[float]:
    """log p of each new id by one full pass."""
    log_p = model(torch.tensor([[*prompt, *new]])).log_softmax(-1)[0]
    return [float(log_p[len(prompt) - 1 + i, number]) for i, number in enumerate(new)]
