"""Use four methods to estimate which word a pronoun refers to, and check whether they agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import AttentionStack, SpecialToken
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, run_with_cache
from qkv.inspection.attention_map import remove_sink, sink_mask, value_weighted_attention
from qkv.inspection.interventions import EdgeMask, apply_interventions, compute_log_probs, target_log_probs
from qkv.inspection.model_input import ModelInput, ModelWithTokenizer, prepare_input
from qkv.inspection.rollout import attention_rollout
from qkv.models import BERT, GPT

MAX_MASKED_BATCH = 16
"""The maximum number of masked copies of a text that a BERT processes in one batch."""


@dataclass(frozen=True, kw_only=True)
class CoreferenceView:
    """The scores of four methods that estimate which candidate a pronoun refers to."""

    text: str
    pronoun: str
    candidates: list[str]
    positions: list[list[int]]
    """The token positions of the pronoun, followed by those of each candidate."""
    attention: list[float]
    """The attention from the pronoun to all tokens of each candidate, averaged over layers and heads.

    The attention sinks (the first position and special tokens) are removed, and each row is renormalized to sum to 1.
    """
    rollout: list[float]
    """The attention rollout from the pronoun to each candidate, computed like `attention`."""
    value_weighted: list[float]
    """The norms ‖a·v·W_O‖ from the pronoun to each candidate, computed like `attention`.

    Each head's rows are normalized to sum to 1 before averaging.
    """
    knock_out: list[float] | None
    """The change in the log-probability of the following text (in nats) if the pronoun cannot attend to the candidate.

    Attention is masked in all layers and heads. A negative value means that the model needed this attention. For a
    BERT, the tokens of the following text are masked one at a time (pseudo-log-likelihood, arXiv:1910.14659).
    """
    remarks: list[str]

    @property
    def columns(self) -> dict[str, list[float]]:
        columns = {"attention": self.attention, "rollout": self.rollout, "value-weighted": self.value_weighted}
        return columns if self.knock_out is None else {**columns, "knock-out": self.knock_out}

    @property
    def selections(self) -> dict[str, str | None]:
        """The candidate that each method selects. It is `None` if no knock-out reduces the log-probability."""
        selections: dict[str, str | None] = {}
        for name, values in self.columns.items():
            if name == "knock-out":
                worst = min(values)
                selections[name] = self.candidates[values.index(worst)] if worst < 0 else None
            else:
                selections[name] = self.candidates[values.index(max(values))]
        return selections

    @property
    def methods_agree(self) -> bool:
        return len(set(self.selections.values())) == 1

    @property
    def verdict(self) -> str:
        """A one-line summary, which includes the selection of each method if the methods disagree."""
        selections = self.selections
        if self.methods_agree:
            return f"all {len(selections)} methods select {next(iter(selections.values())) or 'none'}"
        return "the methods disagree: " + ", ".join(f"{name} → {word or 'none'}" for name, word in selections.items())


def coreference(task: ModelWithTokenizer, text: str, *, pronoun: str, candidates: Sequence[str]) -> CoreferenceView:
    """Estimate with a GPT or BERT which candidate a pronoun in a text refers to.

    If the pronoun occurs several times, the last occurrence is used. If a candidate occurs several times, the last
    occurrence before the pronoun is used.
    """
    model = task.model
    if not isinstance(model, GPT | BERT):
        raise InputError("coreference requires a GPT or a BERT, got a translation model")
    if len(candidates) < 2:
        raise InputError(f"at least 2 candidates are required, got {len(candidates)}")
    model_input = prepare_input(task, text)
    query = model_input.sequence.find_last_occurrence(pronoun)
    keys = [model_input.sequence.find_last_occurrence(word, before=query[0]) for word in candidates]
    for word, candidate_positions in zip(candidates, keys, strict=True):
        if set(candidate_positions) & set(query):
            raise InputError(f"the candidate {word!r} must not overlap the pronoun {pronoun!r}")
        if isinstance(model, GPT) and model.config.causal and candidate_positions[-1] > query[0]:
            raise InputError(
                f"the candidate {word!r} must precede the pronoun {pronoun!r} because a causal model cannot attend to "
                "later words"
            )
    cache = run_with_cache(model, model_input)
    rows = _pronoun_rows_by_method(
        cache, query, candidate_positions={position for candidate_positions in keys for position in candidate_positions}
    )
    shares = [[float(row[candidate_positions].sum()) for candidate_positions in keys] for row in rows]
    knockout, remarks = _knockout_log_prob_changes(task, model_input, query, keys)
    if isinstance(model, GPT) and model.config.causal:
        remarks.append(
            f"A GPT processes {pronoun!r} before the following words, so only the knock-out depends on the end of the "
            "text."
        )
    return CoreferenceView(
        text=text,
        pronoun=pronoun,
        candidates=list(candidates),
        positions=[query, *keys],
        attention=shares[0],
        rollout=shares[1],
        value_weighted=shares[2],
        knock_out=knockout,
        remarks=remarks,
    )


def _pronoun_rows_by_method(
    cache: ActivationCache, query: list[int], *, candidate_positions: set[int]
) -> list[Float[Tensor, " key"]]:
    """Return the pronoun's row in the attention, rollout and value-weighted matrices, without the attention sinks."""
    sink = sink_mask(cache.model_input.sequence)
    sink[list(candidate_positions)] = False  # a candidate at the first position is not treated as a sink
    attention = cache.mean_weights(AttentionStack.SELF).mean(0)
    rollout_matrix = attention_rollout(cache).sequence[-1]
    layer_maps = []
    for layer in range(cache.n_layers(AttentionStack.SELF)):
        norms = value_weighted_attention(cache, AttentionStack.SELF, layer=layer)
        layer_maps.append((norms / norms.sum(-1, keepdim=True).clamp(min=1e-30)).mean(0))
    matrices = (attention, rollout_matrix, torch.stack(layer_maps).mean(0))
    return [remove_sink(matrix[query].mean(0), sink).cpu() for matrix in matrices]


def _knockout_log_prob_changes(
    task: ModelWithTokenizer, model_input: ModelInput, query: list[int], keys: list[list[int]]
) -> tuple[list[float] | None, list[str]]:
    model, n = task.model, len(model_input.sequence.ids)
    following = [position for position in range(query[-1] + 1, n) if not model_input.sequence.is_special[position]]
    if not following:
        return None, ["No text follows the pronoun, so the knock-out column is missing."]
    if isinstance(model, BERT) and model.masked_lm is None:
        return None, ["This BERT has no masked-word head, so the knock-out column is missing."]
    before = _sum_log_probs(task, model_input, following)
    changes = []
    for candidate in keys:
        masks = [
            EdgeMask(stack=AttentionStack.SELF, query=query_position, key=key_position)
            for query_position in query
            for key_position in candidate
        ]
        with apply_interventions(model, masks):
            changes.append(_sum_log_probs(task, model_input, following) - before)
    return changes, []


@torch.no_grad()
def _sum_log_probs(task: ModelWithTokenizer, model_input: ModelInput, positions: list[int]) -> float:
    """Return the sum of the log-probabilities of the tokens at the given positions."""
    model = task.model
    if not isinstance(model, BERT):
        log_probs = target_log_probs(compute_log_probs(model, model_input), model_input)
        return float(log_probs[[position - 1 for position in positions]].double().sum())
    ids = torch.tensor(model_input.sequence.ids, device=next(model.parameters()).device)
    total = 0.0
    for chunk in torch.tensor(positions).split(MAX_MASKED_BATCH):
        rows = torch.arange(len(chunk))
        masked = ids.repeat(len(chunk), 1)
        masked[rows, chunk] = task.tokenizer.special_id(SpecialToken.MASK)
        log_p = model.masked_lm_logits(model(masked)[rows, chunk][None])[0].float().log_softmax(-1)
        total += float(log_p[rows, ids[chunk]].double().sum())
    return total
