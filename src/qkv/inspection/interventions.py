"""What changes if a head is silent, an edge is cut, or a place holds what another text had there?"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionKind
from qkv.errors import InputError, TapError
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.hooks import intervene, mask_attention, ablate_head
from qkv.inspection.validation import check_index
from qkv.inspection.model_input import ModelInput, mark_whitespace
from qkv.inspection.record import record
from qkv.inspection.activation_cache import attention_name, get_blocks, forward_logits, run_with_cache
from qkv.models import Model, RNNSeq2Seq
from qkv.text import Tokenizer
from qkv.text.token_display import token_text


@dataclass(frozen=True, kw_only=True)
class HeadAblation:
    """The head writes nothing."""

    stack: AttentionKind
    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class EdgeMask:
    """The token at `query` may not look at `key`."""

    stack: AttentionKind
    query: int
    key: int
    layer: int | None = None
    """None: in every layer."""
    head: int | None = None
    """None: in every head."""


@dataclass(frozen=True, kw_only=True)
class ActivationPatch:
    """A tap passes on what it had when another text was read."""

    tap: str
    other: ModelInput
    positions: tuple[int, ...] | None = None
    """At these alone; None: at all, for which both texts must be equally long."""


Intervention = HeadAblation | EdgeMask | ActivationPatch


@dataclass(frozen=True, kw_only=True, repr=False)
class InterventionEffect(ShortRepr):
    """What the model says with and without the interventions."""

    positions: list[str]
    position: int
    """Where the guesses below are made."""
    generated: list[str] | None
    """Of a translation, the tokens chosen at the positions."""
    changes: list[str]
    """What was done, in words."""
    ids: list[int]
    """The likeliest before and the likeliest after, each once, in the order of their probability before."""
    tokens: list[str]
    before: Float[Tensor, " guess"]
    """log p"""
    after: Float[Tensor, " guess"]
    divergence: Float[Tensor, " position"]
    """KL(before ‖ after) in nats, at every position."""
    target_before: Float[Tensor, " position"]
    """log p of what really came next, or stands there; NaN where that is open."""
    target_after: Float[Tensor, " position"]


@contextmanager
def apply_interventions(model: Model, interventions: Sequence[Intervention]) -> Iterator[None]:
    """All of them at once, while the `with` lasts."""
    with ExitStack() as stack:
        for one in interventions:
            match one:
                case HeadAblation():
                    check_index("layer", one.layer, len(get_blocks(model, one.stack)), of="layers")
                    stack.enter_context(ablate_head(model, attention_name(model, one.stack, one.layer), one.head))
                case EdgeMask() if isinstance(model, RNNSeq2Seq):
                    raise InputError("the looks of an RNN can be seen, not cut; a Transformer's can be cut")
                case EdgeMask():
                    name = attention_name(model, one.stack, "*" if one.layer is None else one.layer)
                    stack.enter_context(mask_attention(model, name, query=one.query, key=one.key, head=one.head))
                case ActivationPatch():
                    stack.enter_context(_apply_patch(model, one))
        yield


def find_ineffective_masks(model: Model, reading: ModelInput, interventions: Sequence[Intervention]) -> list[EdgeMask]:
    """Cuts that change nothing: what is cut is never looked at, for it comes later or lies outside the window."""
    cuts = [one for one in interventions if isinstance(one, EdgeMask)]
    if not cuts:
        return []
    seen = run_with_cache(model, reading)

    def is_idle(one: EdgeMask) -> bool:
        visible = seen.visible_mask(one.stack)
        query = check_index("query", one.query, visible.shape[0], of="tokens that look")
        key = check_index("key", one.key, visible.shape[1], of="tokens that are looked at")
        return not visible[query, key]

    return [one for one in cuts if is_idle(one)]


@torch.no_grad()
def measure_effect(
    model: Model, tokenizer: Tokenizer, reading: ModelInput, interventions: Sequence[Intervention], *,
    position: int = -1, n: int = 5,
) -> InterventionEffect:  # fmt: skip
    """`position`: where the guesses are shown, the last one unless said; `n`: so many of before and of after."""
    before = compute_log_probs(model, reading)
    position = check_index("position", position, len(before), of="tokens", from_end=True)
    with apply_interventions(model, interventions):
        after = compute_log_probs(model, reading)
    known = tokenizer.vocab_size
    best = {i for log_p in (before, after) for i in log_p[position, :known].topk(min(n, known)).indices.tolist()}
    ids = sorted(best, key=lambda number: -float(before[position, number]))
    return InterventionEffect(
        positions=reading.sequence.labels, position=position, ids=ids,
        generated=None if reading.generated is None else reading.generated.labels,
        changes=[describe_intervention(one, reading) for one in interventions],
        tokens=[mark_whitespace(token_text(tokenizer, number)) for number in ids],
        before=before[position, ids], after=after[position, ids],
        divergence=F.kl_div(after, before, reduction="none", log_target=True).sum(-1),
        target_before=target_log_probs(before, reading), target_after=target_log_probs(after, reading),
    )  # fmt: skip


@torch.no_grad()
def compute_log_probs(model: Model, reading: ModelInput) -> Float[Tensor, "position vocabulary"]:
    was_training = model.training
    model.eval()
    try:
        logits = forward_logits(model, reading)
    finally:
        model.train(was_training)
    if logits is None:
        raise InputError("this BERT has no masked-word head: it says nothing whose change could be measured")
    return logits.float().log_softmax(-1)


def target_log_probs(log_p: Float[Tensor, "position vocabulary"], reading: ModelInput) -> Float[Tensor, " position"]:
    """Of what really came next (of a BERT: stands there); NaN where that is open."""
    wanted = reading.sequence.ids if reading.next_ids is None else reading.next_ids
    found = log_p.new_full((len(log_p),), float("nan"))
    found[: len(wanted)] = log_p[torch.arange(len(wanted)), wanted]
    return found


def describe_intervention(one: Intervention, reading: ModelInput) -> str:
    """What is done, in words."""
    match one:
        case HeadAblation():
            return f"{one.stack}, layer {one.layer}: head {one.head} off"
        case EdgeMask():
            queries, keys = (reading.select_tokens(one.stack, is_key=is_key) for is_key in (False, True))
            layer = "" if one.layer is None else f", layer {one.layer}"
            head = "" if one.head is None else f", head {one.head}"
            query, key = f"{one.query} {queries.labels[one.query]}", f"{one.key} {keys.labels[one.key]}"
            return f"{one.stack}{layer}{head}: {query} may not look at {key}"
        case ActivationPatch():
            return f"{one.tap} as of another text"


@contextmanager
def _apply_patch(model: Model, patch: ActivationPatch) -> Iterator[None]:
    with torch.no_grad(), record(model, patch.tap) as trace:
        forward_logits(model, patch.other)
    there = {name: trace[name] for name in trace.names if name == patch.tap}
    if not there:
        raise TapError(f"'{patch.tap}' is not one tap that can be patched: give its whole name")
    given = there[patch.tap]

    def put(passing: Tensor) -> Tensor:
        if patch.positions is None:
            return given
        least = min(passing.shape[-2], given.shape[-2])
        outside = [at for at in patch.positions if not 0 <= at < least]
        if outside:
            raise TapError(f"position {outside[0]} of '{patch.tap}' is outside the {least} that both texts have")
        passing = passing.clone()
        passing[..., list(patch.positions), :] = given[..., list(patch.positions), :]
        return passing

    with intervene(model, {patch.tap: put}):
        yield
