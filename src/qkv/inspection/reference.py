"""What does *it* refer to? Four answers, and whether they agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import Role, Stack
from qkv.errors import InputError
from qkv.inspection.interventions import EdgeCut, intervening, log_probabilities, of_wanted
from qkv.inspection.maps import sink_of, value_weighted, without_sink
from qkv.inspection.reading import Readable, Reading, read
from qkv.inspection.rollout import rollout
from qkv.inspection.seeing import Seen, see
from qkv.models import BERT, GPT

MOST_TEXTS = 16
"""Read at once by a BERT, each with another token masked."""


@dataclass(frozen=True, kw_only=True)
class ReferenceView:
    """View G. Each list has one number for each candidate."""

    text: str
    pronoun: str
    candidates: list[str]
    places: list[list[int]]
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


def reference(task: Readable, text: str, *, pronoun: str, candidates: Sequence[str]) -> ReferenceView:
    """Of a GPT or BERT. Several places of a word: the pronoun's last, the candidate's last before it."""
    model = task.model
    if not isinstance(model, GPT | BERT):
        raise InputError("what a word refers to is asked of a GPT or a BERT, not of a translator")
    if len(candidates) < 2:
        raise InputError(f"{len(candidates)} candidate was given; at least 2 can be compared")
    reading = read(task, text)
    query = reading.own.places(pronoun)
    keys = [reading.own.places(word, before=query[0]) for word in candidates]
    for word, own in zip(candidates, keys, strict=True):
        if set(own) & set(query):
            raise InputError(f"the candidate {word!r} stands where the pronoun {pronoun!r} does")
        if isinstance(model, GPT) and model.config.causal and own[-1] > query[0]:
            raise InputError(f"the candidate {word!r} stands after {pronoun!r}, where a GPT cannot look")
    seen = see(model, reading)
    rows = _rows(seen, query, taken={place for own in keys for place in own})
    shares = [[float(row[own].sum()) for own in keys] for row in rows]
    knocked, remarks = _knock_out(task, reading, query, keys)
    if isinstance(model, GPT) and model.config.causal:
        remarks.append(
            f"A GPT reads {pronoun!r} before the words after it: only the knock-out can tell two endings apart."
        )
    return ReferenceView(
        text=text, pronoun=pronoun, candidates=list(candidates), places=[query, *keys], attention=shares[0],
        rollout=shares[1], value_weighted=shares[2], knock_out=knocked, remarks=remarks,
    )  # fmt: skip


def _rows(seen: Seen, query: list[int], *, taken: set[int]) -> list[Float[Tensor, " key"]]:
    """The pronoun's row by attention, rollout and value-weighted attention, each without the sink."""
    sink = sink_of(seen.reading.own)
    sink[list(taken)] = False  # a candidate at the first position is a candidate
    attention = seen.means(Stack.SELF).mean(0)
    through = rollout(seen).own[-1]
    moved = []
    for layer in range(seen.n_layers(Stack.SELF)):
        norms = value_weighted(seen, Stack.SELF, layer=layer)
        moved.append((norms / norms.sum(-1, keepdim=True).clamp(min=1e-30)).mean(0))
    tables = (attention, through, torch.stack(moved).mean(0))
    return [without_sink(table[query].mean(0), sink).cpu() for table in tables]


def _knock_out(
    task: Readable, reading: Reading, query: list[int], keys: list[list[int]]
) -> tuple[list[float] | None, list[str]]:
    model, n = task.model, len(reading.own.ids)
    after = [at for at in range(query[-1] + 1, n) if not reading.own.is_special[at]]
    if not after:
        return None, ["Nothing stands after the pronoun, so there is no knock-out column."]
    if isinstance(model, BERT) and model.masked_word is None:
        return None, ["This BERT has no masked-word head, so there is no knock-out column."]
    before = _log_p(task, reading, after)
    changes = []
    for own in keys:
        cuts = [EdgeCut(stack=Stack.SELF, query=one, key=other) for one in query for other in own]
        with intervening(model, cuts):
            changes.append(_log_p(task, reading, after) - before)
    return changes, []


@torch.no_grad()
def _log_p(task: Readable, reading: Reading, places: list[int]) -> float:
    """Σ log p of the tokens at these places."""
    model = task.model
    if not isinstance(model, BERT):
        wanted = of_wanted(log_probabilities(model, reading), reading)
        return float(wanted[[place - 1 for place in places]].double().sum())
    ids = torch.tensor(reading.own.ids, device=next(model.parameters()).device)
    total = 0.0
    for some in torch.tensor(places).split(MOST_TEXTS):
        rows = torch.arange(len(some))
        masked = ids.repeat(len(some), 1)
        masked[rows, some] = task.tokenizer.id_of(Role.MASK)
        log_p = model.masked_word_logits(model(masked)[rows, some][None])[0].float().log_softmax(-1)
        total += float(log_p[rows, ids[some]].double().sum())
    return total
