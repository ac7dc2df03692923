"""What changes if a head is silent, an edge is cut, or a place holds what another text had there?"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Stack
from qkv.errors import InputError, TapError
from qkv.inspection.brief import Brief
from qkv.inspection.change import change, cut_edge, head_off
from qkv.inspection.places import inside
from qkv.inspection.reading import Reading, label
from qkv.inspection.record import record
from qkv.inspection.seeing import attention_name, blocks_of, run, see
from qkv.models import Model, RNNSeq2Seq
from qkv.text import Tokenizer
from qkv.text.showing import text_of


@dataclass(frozen=True, kw_only=True)
class HeadOff:
    """The head writes nothing."""

    stack: Stack
    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class EdgeCut:
    """The token at `query` may not look at `key`."""

    stack: Stack
    query: int
    key: int
    layer: int | None = None
    """None: in every layer."""
    head: int | None = None
    """None: in every head."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A tap passes on what it had when another text was read."""

    tap: str
    other: Reading
    positions: tuple[int, ...] | None = None
    """At these alone; None: at all, for which both texts must be equally long."""


Intervention = HeadOff | EdgeCut | Patch


@dataclass(frozen=True, kw_only=True, repr=False)
class Effect(Brief):
    """What the model says with and without the interventions."""

    positions: list[str]
    position: int
    """Where the guesses below are made."""
    chosen: list[str] | None
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
    wanted_before: Float[Tensor, " position"]
    """log p of what really came next, or stands there; NaN where that is open."""
    wanted_after: Float[Tensor, " position"]


@contextmanager
def intervening(model: Model, interventions: Sequence[Intervention]) -> Iterator[None]:
    """All of them at once, while the `with` lasts."""
    with ExitStack() as stack:
        for one in interventions:
            match one:
                case HeadOff():
                    inside("layer", one.layer, len(blocks_of(model, one.stack)), of="layers")
                    stack.enter_context(head_off(model, attention_name(model, one.stack, one.layer), one.head))
                case EdgeCut() if isinstance(model, RNNSeq2Seq):
                    raise InputError("the looks of an RNN can be seen, not cut; a Transformer's can be cut")
                case EdgeCut():
                    name = attention_name(model, one.stack, "*" if one.layer is None else one.layer)
                    stack.enter_context(cut_edge(model, name, query=one.query, key=one.key, head=one.head))
                case Patch():
                    stack.enter_context(_patched(model, one))
        yield


def idle_cuts(model: Model, reading: Reading, interventions: Sequence[Intervention]) -> list[EdgeCut]:
    """Cuts that change nothing: what is cut is never looked at, for it comes later or lies outside the window."""
    cuts = [one for one in interventions if isinstance(one, EdgeCut)]
    if not cuts:
        return []
    seen = see(model, reading)

    def is_idle(one: EdgeCut) -> bool:
        visible = seen.visible(one.stack)
        query = inside("query", one.query, visible.shape[0], of="tokens that look")
        key = inside("key", one.key, visible.shape[1], of="tokens that are looked at")
        return not visible[query, key]

    return [one for one in cuts if is_idle(one)]


@torch.no_grad()
def effect(
    model: Model, tokenizer: Tokenizer, reading: Reading, interventions: Sequence[Intervention], *,
    position: int = -1, n: int = 5,
) -> Effect:  # fmt: skip
    """`position`: where the guesses are shown, the last one unless said; `n`: so many of before and of after."""
    before = log_probabilities(model, reading)
    position = inside("position", position, len(before), of="tokens", from_end=True)
    with intervening(model, interventions):
        after = log_probabilities(model, reading)
    known = tokenizer.vocab_size
    best = {i for log_p in (before, after) for i in log_p[position, :known].topk(min(n, known)).indices.tolist()}
    ids = sorted(best, key=lambda number: -float(before[position, number]))
    return Effect(
        positions=reading.own.labels, position=position, ids=ids,
        chosen=None if reading.written is None else reading.written.labels,
        changes=[said(one, reading) for one in interventions],
        tokens=[label(text_of(tokenizer, number)) for number in ids],
        before=before[position, ids], after=after[position, ids],
        divergence=F.kl_div(after, before, reduction="none", log_target=True).sum(-1),
        wanted_before=of_wanted(before, reading), wanted_after=of_wanted(after, reading),
    )  # fmt: skip


@torch.no_grad()
def log_probabilities(model: Model, reading: Reading) -> Float[Tensor, "position vocabulary"]:
    was_training = model.training
    model.eval()
    try:
        logits = run(model, reading)
    finally:
        model.train(was_training)
    if logits is None:
        raise InputError("this BERT has no masked-word head: it says nothing whose change could be measured")
    return logits.float().log_softmax(-1)


def of_wanted(log_p: Float[Tensor, "position vocabulary"], reading: Reading) -> Float[Tensor, " position"]:
    """Of what really came next (of a BERT: stands there); NaN where that is open."""
    wanted = reading.own.ids if reading.chosen is None else reading.chosen
    found = log_p.new_full((len(log_p),), float("nan"))
    found[: len(wanted)] = log_p[torch.arange(len(wanted)), wanted]
    return found


def said(one: Intervention, reading: Reading) -> str:
    """What is done, in words."""
    match one:
        case HeadOff():
            return f"{one.stack}, layer {one.layer}: head {one.head} off"
        case EdgeCut():
            queries, keys = (reading.side(one.stack, is_key=is_key) for is_key in (False, True))
            layer = "" if one.layer is None else f", layer {one.layer}"
            head = "" if one.head is None else f", head {one.head}"
            query, key = f"{one.query} {queries.labels[one.query]}", f"{one.key} {keys.labels[one.key]}"
            return f"{one.stack}{layer}{head}: {query} may not look at {key}"
        case Patch():
            return f"{one.tap} as of another text"


@contextmanager
def _patched(model: Model, patch: Patch) -> Iterator[None]:
    with torch.no_grad(), record(model, patch.tap) as trace:
        run(model, patch.other)
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

    with change(model, {patch.tap: put}):
        yield
