"""Estimate which word a pronoun refers to with four methods, and check whether they agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import SpecialToken, Stack
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, run_with_cache
from qkv.inspection.attention_map import remove_sink, sink_mask, value_weighted_attention
from qkv.inspection.interventions import EdgeMask, apply_interventions, compute_log_probs, target_log_probs
from qkv.inspection.model_input import ModelInput, ModelWithTokenizer, prepare_input
from qkv.inspection.rollout import attention_rollout
from qkv.models import BERT, GPT

MAX_MASKED_BATCH = 16
"""Maximum number of masked copies of a text that a BERT processes in one batch."""


@dataclass(frozen=True, kw_only=True)
class CoreferenceView:
    """Four scores per candidate for what a pronoun refers to."""

    text: str
    pronoun: str
    candidates: list[str]
    positions: list[list[int]]
    """Token positions of the pronoun (first) and of each candidate."""
    attention: list[float]
    """Mean attention from the pronoun to each candidate, over all layers and heads and summed over the candidate's tokens.

    The sink (first position and special tokens) is removed and each row is renormalized to sum to 1.
    """
    rollout: list[float]
    """The same for attention rollout."""
    value_weighted: list[float]
    """The same for ‖a·v·W_O‖, with each head's rows normalized to sum to 1 before averaging."""
    knock_out: list[float] | None
    """Change in the summed log-probability (nats) of the text after the pronoun when the pronoun cannot attend to the candidate.

    Attention is masked in all layers and heads. A negative value means that the model needed the attention. For a BERT,
    each of these tokens is masked in turn (pseudo-log-likelihood, arXiv:1910.14659).
    """
    remarks: list[str]

    @property
    def columns(self) -> dict[str, list[float]]:
        found = {"attention": self.attention, "rollout": self.rollout, "value-weighted": self.value_weighted}
        return found if self.knock_out is None else {**found, "knock-out": self.knock_out}

    @property
    def says(self) -> dict[str, str | None]:
        """The candidate that each method selects, or `None` if no knock-out reduces the log-probability."""
        chosen: dict[str, str | None] = {}
        for name, values in self.columns.items():
            if name == "knock-out":
                worst = min(values)
                chosen[name] = self.candidates[values.index(worst)] if worst < 0 else None
            else:
                chosen[name] = self.candidates[values.index(max(values))]
        return chosen

    @property
    def agrees(self) -> bool:
        return len(set(self.says.values())) == 1

    @property
    def verdict(self) -> str:
        """A one-line summary, with the selection of each method if they disagree."""
        said = self.says
        if self.agrees:
            return f"all {len(said)} methods select {next(iter(said.values())) or 'none'}"
        return "the methods disagree: " + ", ".join(f"{name} → {word or 'none'}" for name, word in said.items())


def coreference(task: ModelWithTokenizer, text: str, *, pronoun: str, candidates: Sequence[str]) -> CoreferenceView:
    """Score which candidate a pronoun refers to in a text, with a GPT or BERT.

    If a word occurs several times, the last occurrence of the pronoun is used, and the last occurrence of each candidate
    before the pronoun.
    """
    model = task.model
    if not isinstance(model, GPT | BERT):
        raise InputError("coreference requires a GPT or a BERT, got a translation model")
    if len(candidates) < 2:
        raise InputError(f"at least 2 candidates are required, got {len(candidates)}")
    reading = prepare_input(task, text)
    query = reading.sequence.find_word(pronoun)
    keys = [reading.sequence.find_word(word, before=query[0]) for word in candidates]
    for word, own in zip(candidates, keys, strict=True):
        if set(own) & set(query):
            raise InputError(f"the candidate {word!r} overlaps the pronoun {pronoun!r}")
        if isinstance(model, GPT) and model.config.causal and own[-1] > query[0]:
            raise InputError(
                f"the candidate {word!r} comes after the pronoun {pronoun!r}, where a causal model cannot attend"
            )
    seen = run_with_cache(model, reading)
    rows = _pronoun_rows(seen, query, taken={place for own in keys for place in own})
    shares = [[float(row[own].sum()) for own in keys] for row in rows]
    knocked, remarks = _measure_knockout(task, reading, query, keys)
    if isinstance(model, GPT) and model.config.causal:
        remarks.append(
            f"A GPT processes {pronoun!r} before the words that follow it, so only the "
            "knock-out can distinguish two endings."
        )
    return CoreferenceView(
        text=text,
        pronoun=pronoun,
        candidates=list(candidates),
        positions=[query, *keys],
        attention=shares[0],
        rollout=shares[1],
        value_weighted=shares[2],
        knock_out=knocked,
        remarks=remarks,
    )


def _pronoun_rows(seen: ActivationCache, query: list[int], *, taken: set[int]) -> list[Float[Tensor, " key"]]:
    """Returns the pronoun's row of the attention, rollout and value-weighted matrices, without the sink."""
    sink = sink_mask(seen.model_input.sequence)
    sink[list(taken)] = False  # a candidate at the first position is not treated as a sink
    attention = seen.mean_weights(Stack.SELF).mean(0)
    through = attention_rollout(seen).sequence[-1]
    moved = []
    for layer in range(seen.n_layers(Stack.SELF)):
        norms = value_weighted_attention(seen, Stack.SELF, layer=layer)
        moved.append((norms / norms.sum(-1, keepdim=True).clamp(min=1e-30)).mean(0))
    tables = (attention, through, torch.stack(moved).mean(0))
    return [remove_sink(table[query].mean(0), sink).cpu() for table in tables]


def _measure_knockout(
    task: ModelWithTokenizer, reading: ModelInput, query: list[int], keys: list[list[int]]
) -> tuple[list[float] | None, list[str]]:
    model, n = task.model, len(reading.sequence.ids)
    after = [at for at in range(query[-1] + 1, n) if not reading.sequence.is_special[at]]
    if not after:
        return None, ["No text follows the pronoun, so the knock-out column is missing."]
    if isinstance(model, BERT) and model.masked_word is None:
        return None, ["This BERT has no masked-word head, so the knock-out column is missing."]
    before = _sum_log_probs(task, reading, after)
    changes = []
    for own in keys:
        cuts = [EdgeMask(stack=Stack.SELF, query=one, key=other) for one in query for other in own]
        with apply_interventions(model, cuts):
            changes.append(_sum_log_probs(task, reading, after) - before)
    return changes, []


@torch.no_grad()
def _sum_log_probs(task: ModelWithTokenizer, reading: ModelInput, places: list[int]) -> float:
    """Returns the sum of the log-probabilities of the tokens at the given positions."""
    model = task.model
    if not isinstance(model, BERT):
        wanted = target_log_probs(compute_log_probs(model, reading), reading)
        return float(wanted[[place - 1 for place in places]].double().sum())
    ids = torch.tensor(reading.sequence.ids, device=next(model.parameters()).device)
    total = 0.0
    for some in torch.tensor(places).split(MAX_MASKED_BATCH):
        rows = torch.arange(len(some))
        masked = ids.repeat(len(some), 1)
        masked[rows, some] = task.tokenizer.special_id(SpecialToken.MASK)
        log_p = model.masked_word_logits(model(masked)[rows, some][None])[0].float().log_softmax(-1)
        total += float(log_p[rows, ids[some]].double().sum())
    return total
