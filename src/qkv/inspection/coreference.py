"""What does *it* refer to? Four answers, and whether they agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import SpecialToken, Stack
from qkv.errors import InputError
from qkv.inspection.interventions import EdgeMask, apply_interventions, compute_log_probs, target_log_probs
from qkv.inspection.attention_map import sink_mask, value_weighted_attention, remove_sink
from qkv.inspection.model_input import ModelWithTokenizer, ModelInput, prepare_input
from qkv.inspection.rollout import attention_rollout
from qkv.inspection.activation_cache import ActivationCache, run_with_cache
from qkv.models import BERT, GPT

MAX_MASKED_BATCH = 16
"""Read at once by a BERT, each with another token masked."""


@dataclass(frozen=True, kw_only=True)
class CoreferenceView:
    """View G. Each list has one number for each candidate."""

    text: str
    pronoun: str
    candidates: list[str]
    positions: list[list[int]]
    """At which tokens the pronoun (first) and the candidates stand."""
    attention: list[float]
    """Mean weight of all layers and heads from pronoun to candidate, its tokens summed; the sink (first position
    and special tokens) is left out and the rest is made to sum to 1."""
    rollout: list[float]
    """The same of attention multiplied through the layers."""
    value_weighted: list[float]
    """The same of ‖a·v·W_O‖, each head's row made to sum to 1 before the mean."""
    knock_out: list[float] | None
    """Change of Σ log p of the text after the pronoun (nats) when the pronoun may not look at the candidate, in any
    layer and head. Negative: the model needed the look. Of a BERT each of these tokens is masked in its turn
    (pseudo-log-probability, arXiv:1910.14659)."""
    remarks: list[str]

    @property
    def columns(self) -> dict[str, list[float]]:
        found = {"attention": self.attention, "rollout": self.rollout, "value-weighted": self.value_weighted}
        return found if self.knock_out is None else {**found, "knock-out": self.knock_out}

    @property
    def says(self) -> dict[str, str | None]:
        """Of each column the candidate it points at; None: of a knock-out that hurts with no candidate."""
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
        """One line, with every column's answer where they disagree."""
        said = self.says
        if self.agrees:
            return f"all {len(said)} columns point at {next(iter(said.values())) or 'none'}"
        return "the columns disagree: " + ", ".join(f"{name} → {word or 'none'}" for name, word in said.items())


def coreference(task: ModelWithTokenizer, text: str, *, pronoun: str, candidates: Sequence[str]) -> CoreferenceView:
    """Of a GPT or BERT. Several places of a word: the pronoun's last, the candidate's last before it."""
    model = task.model
    if not isinstance(model, GPT | BERT):
        raise InputError("what a word refers to is asked of a GPT or a BERT, not of a translator")
    if len(candidates) < 2:
        raise InputError(f"{len(candidates)} candidate was given; at least 2 can be compared")
    reading = prepare_input(task, text)
    query = reading.sequence.find_word(pronoun)
    keys = [reading.sequence.find_word(word, before=query[0]) for word in candidates]
    for word, own in zip(candidates, keys, strict=True):
        if set(own) & set(query):
            raise InputError(f"the candidate {word!r} stands where the pronoun {pronoun!r} does")
        if isinstance(model, GPT) and model.config.causal and own[-1] > query[0]:
            raise InputError(f"the candidate {word!r} stands after {pronoun!r}, where a GPT cannot look")
    seen = run_with_cache(model, reading)
    rows = _pronoun_rows(seen, query, taken={place for own in keys for place in own})
    shares = [[float(row[own].sum()) for own in keys] for row in rows]
    knocked, remarks = _measure_knockout(task, reading, query, keys)
    if isinstance(model, GPT) and model.config.causal:
        remarks.append(
            f"A GPT reads {pronoun!r} before the words after it: only the knock-out can tell two endings apart."
        )
    return CoreferenceView(
        text=text, pronoun=pronoun, candidates=list(candidates), positions=[query, *keys], attention=shares[0],
        rollout=shares[1], value_weighted=shares[2], knock_out=knocked, remarks=remarks,
    )  # fmt: skip


def _pronoun_rows(seen: ActivationCache, query: list[int], *, taken: set[int]) -> list[Float[Tensor, " key"]]:
    """The pronoun's row by attention, rollout and value-weighted attention, each without the sink."""
    sink = sink_mask(seen.model_input.sequence)
    sink[list(taken)] = False  # a candidate at the first position is a candidate
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
        return None, ["Nothing stands after the pronoun, so there is no knock-out column."]
    if isinstance(model, BERT) and model.masked_word is None:
        return None, ["This BERT has no masked-word head, so there is no knock-out column."]
    before = _sum_log_probs(task, reading, after)
    changes = []
    for own in keys:
        cuts = [EdgeMask(stack=Stack.SELF, query=one, key=other) for one in query for other in own]
        with apply_interventions(model, cuts):
            changes.append(_sum_log_probs(task, reading, after) - before)
    return changes, []


@torch.no_grad()
def _sum_log_probs(task: ModelWithTokenizer, reading: ModelInput, places: list[int]) -> float:
    """Σ log p of the tokens at these places."""
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
