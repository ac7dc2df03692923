"""Measure how predictions change when heads are ablated, attention is masked or activations are patched."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionKind
from qkv.errors import InputError, TapError
from qkv.inspection.activation_cache import attention_name, forward_logits, get_blocks, run_with_cache
from qkv.inspection.hooks import ablate_head, intervene, mask_attention
from qkv.inspection.model_input import ModelInput, mark_whitespace
from qkv.inspection.record import record
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import Model, RNNSeq2Seq
from qkv.text import Tokenizer
from qkv.text.token_display import token_text


@dataclass(frozen=True, kw_only=True)
class HeadAblation:
    """Set the result of one head to zero."""

    stack: AttentionKind
    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class EdgeMask:
    """Mask attention from position `query` to position `key`."""

    stack: AttentionKind
    query: int
    key: int
    layer: int | None = None
    """`None` means every layer."""
    head: int | None = None
    """`None` means every head."""


@dataclass(frozen=True, kw_only=True)
class ActivationPatch:
    """Replace the activations of a tap with those of another text."""

    tap: str
    other: ModelInput
    positions: tuple[int, ...] | None = None
    """Positions to patch. `None` patches all of them, which requires texts of equal length."""


Intervention = HeadAblation | EdgeMask | ActivationPatch


@dataclass(frozen=True, kw_only=True, repr=False)
class InterventionEffect(ShortRepr):
    """Predictions of a model with and without interventions."""

    positions: list[str]
    position: int
    """The position of the predictions below."""
    generated: list[str] | None
    """For a translation, the tokens generated at the positions."""
    changes: list[str]
    """Descriptions of the interventions."""
    ids: list[int]
    """The most likely tokens before and after, without duplicates, by decreasing probability before."""
    tokens: list[str]
    before: Float[Tensor, " guess"]
    """Log-probabilities."""
    after: Float[Tensor, " guess"]
    divergence: Float[Tensor, " position"]
    """KL(before ‖ after) in nats at every position."""
    target_before: Float[Tensor, " position"]
    """Log-probability of the actual token (next token, or the token itself for a BERT). NaN if it is unknown."""
    target_after: Float[Tensor, " position"]


@contextmanager
def apply_interventions(model: Model, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Apply all interventions within the `with` block."""
    with ExitStack() as stack:
        for one in interventions:
            match one:
                case HeadAblation():
                    check_index("layer", one.layer, len(get_blocks(model, one.stack)), of="layers")
                    stack.enter_context(ablate_head(model, attention_name(model, one.stack, one.layer), one.head))
                case EdgeMask() if isinstance(model, RNNSeq2Seq):
                    raise InputError("attention of an RNN cannot be masked, only a Transformer's attention can")
                case EdgeMask():
                    name = attention_name(model, one.stack, "*" if one.layer is None else one.layer)
                    stack.enter_context(mask_attention(model, name, query=one.query, key=one.key, head=one.head))
                case ActivationPatch():
                    stack.enter_context(_apply_patch(model, one))
        yield


def find_ineffective_masks(model: Model, reading: ModelInput, interventions: Sequence[Intervention]) -> list[EdgeMask]:
    """Returns the masks that have no effect, because the query cannot attend to the key (causal mask or sliding
    window)."""
    cuts = [one for one in interventions if isinstance(one, EdgeMask)]
    if not cuts:
        return []
    seen = run_with_cache(model, reading)

    def is_idle(one: EdgeMask) -> bool:
        visible = seen.visible_mask(one.stack)
        query = check_index("query", one.query, visible.shape[0], of="query tokens")
        key = check_index("key", one.key, visible.shape[1], of="key tokens")
        return not visible[query, key]

    return [one for one in cuts if is_idle(one)]


@torch.no_grad()
def measure_effect(
    model: Model,
    tokenizer: Tokenizer,
    reading: ModelInput,
    interventions: Sequence[Intervention],
    *,
    position: int = -1,
    n: int = 5,
) -> InterventionEffect:
    """Compare the model's predictions with and without the interventions.

    The `n` most likely tokens before and after are returned for `position`, which defaults to the last one.
    """
    before = compute_log_probs(model, reading)
    position = check_index("position", position, len(before), of="tokens", from_end=True)
    with apply_interventions(model, interventions):
        after = compute_log_probs(model, reading)
    known = tokenizer.vocab_size
    best = {i for log_p in (before, after) for i in log_p[position, :known].topk(min(n, known)).indices.tolist()}
    ids = sorted(best, key=lambda number: -float(before[position, number]))
    return InterventionEffect(
        positions=reading.sequence.labels,
        position=position,
        ids=ids,
        generated=None if reading.generated is None else reading.generated.labels,
        changes=[describe_intervention(one, reading) for one in interventions],
        tokens=[mark_whitespace(token_text(tokenizer, number)) for number in ids],
        before=before[position, ids],
        after=after[position, ids],
        divergence=F.kl_div(after, before, reduction="none", log_target=True).sum(-1),
        target_before=target_log_probs(before, reading),
        target_after=target_log_probs(after, reading),
    )


@torch.no_grad()
def compute_log_probs(model: Model, reading: ModelInput) -> Float[Tensor, "position vocabulary"]:
    was_training = model.training
    model.eval()
    try:
        logits = forward_logits(model, reading)
    finally:
        model.train(was_training)
    if logits is None:
        raise InputError("this BERT has no masked-word head, so the effect on its predictions cannot be measured")
    return logits.float().log_softmax(-1)


def target_log_probs(log_p: Float[Tensor, "position vocabulary"], reading: ModelInput) -> Float[Tensor, " position"]:
    """Returns the log-probability of the actual token at each position, or NaN if it is unknown."""
    wanted = reading.sequence.ids if reading.next_ids is None else reading.next_ids
    found = log_p.new_full((len(log_p),), float("nan"))
    found[: len(wanted)] = log_p[torch.arange(len(wanted)), wanted]
    return found


def describe_intervention(one: Intervention, reading: ModelInput) -> str:
    """Returns a one-line description of an intervention."""
    match one:
        case HeadAblation():
            return f"{one.stack}, layer {one.layer}: head {one.head} ablated"
        case EdgeMask():
            queries, keys = (reading.select_tokens(one.stack, is_key=is_key) for is_key in (False, True))
            layer = "" if one.layer is None else f", layer {one.layer}"
            head = "" if one.head is None else f", head {one.head}"
            query, key = f"{one.query} {queries.labels[one.query]}", f"{one.key} {keys.labels[one.key]}"
            return f"{one.stack}{layer}{head}: {query} cannot attend to {key}"
        case ActivationPatch():
            return f"{one.tap} patched from another text"


@contextmanager
def _apply_patch(model: Model, patch: ActivationPatch) -> Iterator[None]:
    with torch.no_grad(), record(model, patch.tap) as trace:
        forward_logits(model, patch.other)
    there = {name: trace[name] for name in trace.names if name == patch.tap}
    if not there:
        raise TapError(f"'{patch.tap}' must be the full name of a single tap")
    given = there[patch.tap]

    def put(passing: Tensor) -> Tensor:
        if patch.positions is None:
            return given
        least = min(passing.shape[-2], given.shape[-2])
        outside = [at for at in patch.positions if not 0 <= at < least]
        if outside:
            raise TapError(
                f"position {outside[0]} of '{patch.tap}' is outside the {least} positions that both texts have"
            )
        passing = passing.clone()
        passing[..., list(patch.positions), :] = given[..., list(patch.positions), :]
        return passing

    with intervene(model, {patch.tap: put}):
        yield
