"""List candidates for the next token, with their probabilities before and after applying the sampling settings."""

from dataclasses import dataclass

import torch

from qkv.config import SamplingConfig
from qkv.generation.generate import GenerationStep
from qkv.generation.sampling import process_logits


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token that could have been generated at a step."""

    id: int
    probability: float
    """Probability according to the model."""
    revised: float
    """Probability after repetition penalty, temperature and filters, or 0 if the token was filtered out."""
    is_chosen: bool


@torch.inference_mode()
def top_raw_and_processed_candidates(step: GenerationStep, sampling: SamplingConfig, *, n: int = 5) -> list[Candidate]:
    """Return the chosen token and the `n` most probable tokens before and after applying the sampling settings.

    Candidates are sorted by their probability according to the model, highest first.
    """
    seen_mask = torch.zeros_like(step.logits, dtype=torch.bool)
    seen_mask[0, [*step.sequence.prompt, *step.sequence.new_ids[:-1]]] = True
    before = step.logits.float().softmax(-1)[0]
    after = process_logits(step.logits, sampling, seen_mask).softmax(-1)[0]
    n = min(n, len(before))
    best_after = [i for i in after.topk(n).indices.tolist() if after[i] > 0]
    token_ids = {*before.topk(n).indices.tolist(), *best_after, step.id}
    candidates = [
        Candidate(id=i, probability=float(before[i]), revised=float(after[i]), is_chosen=i == step.id)
        for i in token_ids
    ]
    return sorted(candidates, key=lambda candidate: (-candidate.probability, candidate.id))
