"""Measure how predictions change when heads are ablated, attention is masked or activations are patched."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionStack
from qkv.errors import InputError, TapError
from qkv.inspection.activation_cache import attention_module_name, forward_logits, get_blocks, run_with_cache
from qkv.inspection.hooks import ablate_head, intervene, mask_attention
from qkv.inspection.model_input import ModelInput, mark_whitespace
from qkv.inspection.record import record
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import Model, RNNSeq2Seq
from qkv.text import Tokenizer
from qkv.text.token_display import token_text_or_vocabulary_name


@dataclass(frozen=True, kw_only=True)
class HeadAblation:
    """An intervention that sets the result of one head to zero."""

    stack: AttentionStack
    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class EdgeMask:
    """An intervention that masks attention from position `query` to position `key`."""

    stack: AttentionStack
    query: int
    key: int
    layer: int | None = None
    """The layer, or `None` for every layer."""
    head: int | None = None
    """The head, or `None` for every head."""


@dataclass(frozen=True, kw_only=True)
class ActivationPatch:
    """An intervention that replaces the activations at a tap with those from another text."""

    tap: str
    other: ModelInput
    positions: tuple[int, ...] | None = None
    """The positions to patch, or `None` for all positions, which requires texts of equal length."""


Intervention = HeadAblation | EdgeMask | ActivationPatch


@dataclass(frozen=True, kw_only=True, repr=False)
class InterventionEffect(ShortRepr):
    """The predictions of a model with and without interventions."""

    positions: list[str]
    position: int
    """The position to which `ids`, `tokens` and their log-probabilities belong."""
    generated: list[str] | None
    """For a translation, the token generated at each position."""
    changes: list[str]
    """A description of each intervention."""
    ids: list[int]
    """The most likely ids without and with the interventions, sorted by decreasing probability without them."""
    tokens: list[str]
    log_probs_before: Float[Tensor, " guess"]
    log_probs_after: Float[Tensor, " guess"]
    divergence: Float[Tensor, " position"]
    """The KL divergence KL(before ‖ after) in nats at each position."""
    target_log_probs_before: Float[Tensor, " position"]
    """The log-probability of the actual next token (for a BERT, of the token itself), or NaN if it is unknown."""
    target_log_probs_after: Float[Tensor, " position"]


@contextmanager
def apply_interventions(model: Model, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Apply all interventions within the `with` block."""
    with ExitStack() as stack:
        for intervention in interventions:
            match intervention:
                case HeadAblation():
                    check_index("layer", intervention.layer, len(get_blocks(model, intervention.stack)), unit="layers")
                    stack.enter_context(
                        ablate_head(
                            model,
                            attention_module_name(model, intervention.stack, intervention.layer),
                            intervention.head,
                        )
                    )
                case EdgeMask() if isinstance(model, RNNSeq2Seq):
                    raise InputError("masking attention requires a Transformer, got an RNN")
                case EdgeMask():
                    name = attention_module_name(
                        model, intervention.stack, "*" if intervention.layer is None else intervention.layer
                    )
                    stack.enter_context(
                        mask_attention(
                            model, name, query=intervention.query, key=intervention.key, head=intervention.head
                        )
                    )
                case ActivationPatch():
                    stack.enter_context(_patch_from_other_input(model, intervention))
        yield


def find_ineffective_masks(
    model: Model, model_input: ModelInput, interventions: Sequence[Intervention]
) -> list[EdgeMask]:
    """Return the masks that have no effect because the model never attends from the query to the key.

    For example, a key may be after the query in a causal model or outside the sliding window.
    """
    masks = [intervention for intervention in interventions if isinstance(intervention, EdgeMask)]
    if not masks:
        return []
    cache = run_with_cache(model, model_input)

    def is_ineffective(intervention: EdgeMask) -> bool:
        visible = cache.visible_mask(intervention.stack)
        query = check_index("query", intervention.query, visible.shape[0], unit="query tokens")
        key = check_index("key", intervention.key, visible.shape[1], unit="key tokens")
        return not visible[query, key]

    return [intervention for intervention in masks if is_ineffective(intervention)]


@torch.no_grad()
def measure_effect(
    model: Model,
    tokenizer: Tokenizer,
    model_input: ModelInput,
    interventions: Sequence[Intervention],
    *,
    position: int = -1,
    n: int = 5,
) -> InterventionEffect:
    """Compare the model's predictions with and without the interventions.

    The result contains the `n` most likely tokens in both cases at `position`, which defaults to the last position.
    """
    before = compute_log_probs(model, model_input)
    position = check_index("position", position, len(before), unit="tokens", from_end=True)
    with apply_interventions(model, interventions):
        after = compute_log_probs(model, model_input)
    vocab_size = tokenizer.vocab_size
    top_ids = {
        i for log_p in (before, after) for i in log_p[position, :vocab_size].topk(min(n, vocab_size)).indices.tolist()
    }
    ids = sorted(top_ids, key=lambda token_id: -float(before[position, token_id]))
    return InterventionEffect(
        positions=model_input.sequence.labels,
        position=position,
        ids=ids,
        generated=None if model_input.generated is None else model_input.generated.labels,
        changes=[describe_intervention(intervention, model_input) for intervention in interventions],
        tokens=[mark_whitespace(token_text_or_vocabulary_name(tokenizer, token_id)) for token_id in ids],
        log_probs_before=before[position, ids],
        log_probs_after=after[position, ids],
        divergence=F.kl_div(after, before, reduction="none", log_target=True).sum(-1),
        target_log_probs_before=target_log_probs(before, model_input),
        target_log_probs_after=target_log_probs(after, model_input),
    )


@torch.no_grad()
def compute_log_probs(model: Model, model_input: ModelInput) -> Float[Tensor, "position vocabulary"]:
    was_training = model.training
    model.eval()
    try:
        logits = forward_logits(model, model_input)
    finally:
        model.train(was_training)
    if logits is None:
        raise InputError("this BERT has no masked-word head, which is required to measure the effect on predictions")
    return logits.float().log_softmax(-1)


def target_log_probs(
    log_p: Float[Tensor, "position vocabulary"], model_input: ModelInput
) -> Float[Tensor, " position"]:
    """Return the log-probability of the actual token at each position, or NaN if it is unknown."""
    targets = model_input.sequence.ids if model_input.next_ids is None else model_input.next_ids
    target_log_p = log_p.new_full((len(log_p),), float("nan"))
    target_log_p[: len(targets)] = log_p[torch.arange(len(targets)), targets]
    return target_log_p


def describe_intervention(intervention: Intervention, model_input: ModelInput) -> str:
    """Return a one-line description of an intervention."""
    match intervention:
        case HeadAblation():
            return f"{intervention.stack}, layer {intervention.layer}: head {intervention.head} ablated"
        case EdgeMask():
            queries, keys = (
                model_input.attention_axis_tokens(intervention.stack, is_key=is_key) for is_key in (False, True)
            )
            layer = "" if intervention.layer is None else f", layer {intervention.layer}"
            head = "" if intervention.head is None else f", head {intervention.head}"
            query, key = (
                f"{intervention.query} {queries.labels[intervention.query]}",
                f"{intervention.key} {keys.labels[intervention.key]}",
            )
            return f"{intervention.stack}{layer}{head}: {query} cannot attend to {key}"
        case ActivationPatch():
            return f"{intervention.tap} patched from another text"


@contextmanager
def _patch_from_other_input(model: Model, patch: ActivationPatch) -> Iterator[None]:
    with torch.no_grad(), record(model, patch.tap) as activations:
        forward_logits(model, patch.other)
    recorded = {name: activations[name] for name in activations.names if name == patch.tap}
    if not recorded:
        raise TapError(f"tap must be the full name of a single tap, got '{patch.tap}'")
    patch_values = recorded[patch.tap]

    def apply_patch(activation: Tensor) -> Tensor:
        if patch.positions is None:
            return patch_values
        n_common = min(activation.shape[-2], patch_values.shape[-2])
        invalid = [position for position in patch.positions if not 0 <= position < n_common]
        if invalid:
            raise TapError(
                f"position {invalid[0]} of '{patch.tap}' is outside the {n_common} positions that both texts have"
            )
        activation = activation.clone()
        activation[..., list(patch.positions), :] = patch_values[..., list(patch.positions), :]
        return activation

    with intervene(model, {patch.tap: apply_patch}):
        yield
