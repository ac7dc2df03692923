"""What might have come next, and how the settings revised its probability."""

from dataclasses import dataclass

import torch

from qkv.config import SamplingConfig
from qkv.generation.generate import GenerationStep
from qkv.generation.sampling import process_logits


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One id that could have been next."""

    id: int
    probability: float
    """The model's own."""
    revised: float
    """After repetition penalty, temperature and filters: what was drawn from. 0: filtered out."""
    is_chosen: bool


@torch.inference_mode()
def top_candidates(step: GenerationStep, sampling: SamplingConfig, *, n: int = 5) -> list[Candidate]:
    """The n likeliest before and after the settings, and the chosen one; the model's likeliest first."""
    said = torch.zeros_like(step.logits, dtype=torch.bool)
    said[0, [*step.sequence.prompt, *step.sequence.new_ids[:-1]]] = True
    before = step.logits.float().softmax(-1)[0]
    after = process_logits(step.logits, sampling, said).softmax(-1)[0]
    n = min(n, len(before))
    best_after = [i for i in after.topk(n).indices.tolist() if after[i] > 0]
    shown = {*before.topk(n).indices.tolist(), *best_after, step.id}
    found = [
        Candidate(id=i, probability=float(before[i]), revised=float(after[i]), is_chosen=i == step.id) for i in shown
    ]
    return sorted(found, key=lambda one: (-one.probability, one.id))
