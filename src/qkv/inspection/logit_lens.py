"""Compute the logit lens, which applies the final norm and the unembedding to the residual stream after each layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.choices import AttentionStack
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, get_blocks
from qkv.inspection.model_input import mark_whitespace
from qkv.inspection.short_repr import ShortRepr
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.tensors import Logits, Residual
from qkv.text import Tokenizer
from qkv.text.token_display import token_text_or_vocabulary_name

CHUNK_POSITIONS = 256
"""The number of positions whose logits are computed at once. All logits of a long text might not fit into memory."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LogitLensView(ShortRepr):
    """The most likely tokens at each depth and position. The last depth corresponds to the model's output."""

    depths: list[str]
    positions: list[str]
    """The input tokens. For each of them, a GPT or decoder predicts the next token, and a BERT the token itself."""
    ids: Int[Tensor, "depth position guess"]
    probabilities: Float[Tensor, "depth position guess"]
    tokens: list[list[list[str]]]
    predicts_next: bool
    """Whether the model predicts the next token, which is not the case for a BERT."""
    targets: list[str | None]
    """The actual token at each position, or `None` where it is unknown."""
    target_probabilities: Float[Tensor, "depth position"]
    """The probability of each actual token, or NaN where it is unknown."""


def logit_lens(cache: ActivationCache, tokenizer: Tokenizer, *, n: int = 5) -> LogitLensView:
    """Compute the most likely tokens at each depth and position.

    For a BERT, the masked-word head is used. For a translation model, the decoder is used. For an RNN, the result
    contains only the last depth.
    """
    if cache.logits is None:
        raise InputError("this BERT has no masked-word head, which the logit lens requires")
    sequence = cache.model_input.sequence
    targets: list[int | None] = list(sequence.ids if cache.model_input.next_ids is None else cache.model_input.next_ids)
    targets += [None] * (len(sequence.ids) - len(targets))
    target_ids = torch.tensor([0 if target is None else target for target in targets])
    rows = [
        _top_predictions(logits, target_ids, vocab_size=tokenizer.vocab_size, n=n) for logits in _logits_by_depth(cache)
    ]
    ids, probabilities, target_probabilities = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    target_probabilities[:, [target is None for target in targets]] = float("nan")
    return LogitLensView(
        depths=depth_names(len(rows)),
        positions=sequence.labels,
        ids=ids,
        probabilities=probabilities,
        tokens=[
            [[mark_whitespace(token_text_or_vocabulary_name(tokenizer, i)) for i in cell] for cell in row]
            for row in ids.tolist()
        ],
        predicts_next=cache.model_input.next_ids is not None,
        targets=[
            None if target is None else mark_whitespace(token_text_or_vocabulary_name(tokenizer, target))
            for target in targets
        ],
        target_probabilities=target_probabilities,
    )


@torch.no_grad()
def unembed(model: Model, states: Float[Tensor, "position d_model"]) -> Float[Tensor, "position vocabulary"]:
    """Return the logits that result from applying the final norm and the unembedding to residual-stream states."""
    return _apply_final_norm_and_unembedding(model, states[None])[0]


def _apply_final_norm_and_unembedding(model: Model, states: Residual) -> Logits:
    match model:
        case GPT():
            return model.unembedding(model.final_norm(states))
        case BERT():
            return model.masked_lm_logits(model.final_norm(states))
        case Seq2Seq():
            return model.unembedding(model.decoder.final_norm(states))
        case RNNSeq2Seq():
            raise InputError("a residual stream between layers is required, which an RNN does not have")


def depth_names(n: int) -> list[str]:
    return ["output"] if n == 1 else ["embedding", *(f"after layer {layer}" for layer in range(n - 1))]


def residual_tap_names(model: Model, stack: AttentionStack) -> list[str]:
    """Return the names of the residual-stream taps before the first layer and after each layer."""
    prefix = {AttentionStack.SELF: "", AttentionStack.ENCODER: "encoder."}.get(stack, "decoder.")
    n = len(get_blocks(model, stack))
    return [f"{prefix}blocks.0.resid_pre", *(f"{prefix}blocks.{layer}.resid_post" for layer in range(n))]


def _logits_by_depth(cache: ActivationCache) -> Iterator[Iterator[Float[Tensor, "some vocabulary"]]]:
    """Yield the logits at each depth, in chunks of positions."""
    if isinstance(cache.model, RNNSeq2Seq):
        assert cache.logits is not None
        yield iter(cache.logits.split(CHUNK_POSITIONS))
        return
    for name in residual_tap_names(
        cache.model, AttentionStack.DECODER if isinstance(cache.model, Seq2Seq) else AttentionStack.SELF
    ):
        yield (unembed(cache.model, chunk) for chunk in cache.get_activation(name).split(CHUNK_POSITIONS))


def _top_predictions(
    logits: Iterator[Float[Tensor, "some vocabulary"]], target_ids: Int[Tensor, " position"], *, vocab_size: int, n: int
) -> tuple[Int[Tensor, "position guess"], Float[Tensor, "position guess"], Float[Tensor, " position"]]:
    """Return the most likely ids, their probabilities and the probabilities of the actual tokens.

    Unembedding rows outside the tokenizer's vocabulary (`vocab_size`) are never predicted.
    """
    parts = []
    for chunk, chunk_targets in zip(logits, target_ids.split(CHUNK_POSITIONS), strict=True):
        p = chunk.float().softmax(-1)
        best = p[:, :vocab_size].topk(min(n, vocab_size))
        parts.append((best.indices, best.values, p.gather(-1, chunk_targets.to(p.device)[:, None])[:, 0]))
    ids, probabilities, target_probabilities = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ids, probabilities, target_probabilities
