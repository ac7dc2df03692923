"""Small random models with uneven probabilities, in float64 so that implementations agree on every id."""

import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT
from tests.agreement.model_strategies import build_random_model

VOCAB_SIZE, CONTEXT = 23, 29


def small_gpt(*, seed: int = 0, vocab_size: int = VOCAB_SIZE, context: int = CONTEXT, **settings) -> GPT:
    options = {"d_model": 12, "n_heads": 3, "n_layers": 2, "positions": PositionKind.ROTARY, **settings}
    return build_random_model(GPTConfig(vocab_size=vocab_size, context_length=context, **options), seed)


@torch.no_grad()
def score_with_full_pass(model: GPT, prompt: list[int], new_ids: list[int]) -> list[float]:
    """Log-probability of each new id, computed by one full pass."""
    log_p = model(torch.tensor([[*prompt, *new_ids]])).log_softmax(-1)[0]
    return [float(log_p[len(prompt) - 1 + i, token_id]) for i, token_id in enumerate(new_ids)]
