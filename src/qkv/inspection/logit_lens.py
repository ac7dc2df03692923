"""Logit lens: apply the final norm and the unembedding to the residual stream after every layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.choices import Stack
from qkv.errors import InputError
from qkv.inspection.activation_cache import ActivationCache, get_blocks
from qkv.inspection.model_input import mark_whitespace
from qkv.inspection.short_repr import ShortRepr
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.tensors import Logits, Residual
from qkv.text import Tokenizer
from qkv.text.token_display import token_text

CHUNK_POSITIONS = 256
"""Number of positions whose logits are computed at once, because the logits of a long text would not fit in memory."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LogitLensView(ShortRepr):
    """The most likely tokens at each depth and position. The last depth is the model's output."""

    depths: list[str]
    positions: list[str]
    """The input tokens. A GPT and a decoder predict the next token, a BERT the token at the position."""
    ids: Int[Tensor, "depth position guess"]
    probabilities: Float[Tensor, "depth position guess"]
    tokens: list[list[list[str]]]
    predicts_next: bool
    """Whether the next token is predicted. `False` for a BERT."""
    targets: list[str | None]
    """The actual tokens, where they are known."""
    target_probabilities: Float[Tensor, "depth position"]
    """Probabilities of the actual tokens, or NaN where they are unknown."""


def logit_lens(seen: ActivationCache, tokenizer: Tokenizer, *, n: int = 5) -> LogitLensView:
    """Compute the logit lens. An RNN only has its last depth.

    A BERT uses its masked-word head, and a translation model uses its decoder.
    """
    if seen.logits is None:
        raise InputError("this BERT has no masked-word head, so the logit lens is not available")
    own = seen.model_input.sequence
    wanted: list[int | None] = list(own.ids if seen.model_input.next_ids is None else seen.model_input.next_ids)
    wanted += [None] * (len(own.ids) - len(wanted))
    came = torch.tensor([0 if one is None else one for one in wanted])
    rows = [_top_predictions(logits, came, known=tokenizer.vocab_size, n=n) for logits in _logits_by_depth(seen)]
    ids, probabilities, of_wanted = (torch.stack(one) for one in zip(*rows, strict=True))
    of_wanted[:, [one is None for one in wanted]] = float("nan")
    return LogitLensView(
        depths=depth_names(len(rows)),
        positions=own.labels,
        ids=ids,
        probabilities=probabilities,
        tokens=[[[mark_whitespace(token_text(tokenizer, i)) for i in cell] for cell in row] for row in ids.tolist()],
        predicts_next=seen.model_input.next_ids is not None,
        targets=[None if one is None else mark_whitespace(token_text(tokenizer, one)) for one in wanted],
        target_probabilities=of_wanted,
    )


@torch.no_grad()
def unembed(model: Model, states: Float[Tensor, "position d_model"]) -> Float[Tensor, "position vocabulary"]:
    """Returns the logits of residual-stream states after the final norm and the unembedding."""
    return _apply_unembedding(model, states[None])[0]


def _apply_unembedding(model: Model, states: Residual) -> Logits:
    match model:
        case GPT():
            return model.unembedding(model.final_norm(states))
        case BERT():
            return model.masked_word_logits(model.final_norm(states))
        case Seq2Seq():
            return model.unembedding(model.decoder.final_norm(states))
        case RNNSeq2Seq():
            raise InputError("an RNN has no residual stream between its layers")


def depth_names(n: int) -> list[str]:
    return ["output"] if n == 1 else ["embedding", *(f"after layer {layer}" for layer in range(n - 1))]


def residual_tap_names(model: Model, stack: Stack) -> list[str]:
    """Returns the residual-stream taps before the first layer and after each layer."""
    prefix = {Stack.SELF: "", Stack.ENCODER: "encoder."}.get(stack, "decoder.")
    n = len(get_blocks(model, stack))
    return [f"{prefix}blocks.0.resid_pre", *(f"{prefix}blocks.{layer}.resid_post" for layer in range(n))]


def _logits_by_depth(seen: ActivationCache) -> Iterator[Iterator[Float[Tensor, "some vocabulary"]]]:
    """Yield the logits of each depth, in chunks of positions."""
    if isinstance(seen.model, RNNSeq2Seq):
        assert seen.logits is not None
        yield iter(seen.logits.split(CHUNK_POSITIONS))
        return
    for name in residual_tap_names(seen.model, Stack.DECODER if isinstance(seen.model, Seq2Seq) else Stack.SELF):
        yield (unembed(seen.model, some) for some in seen.get_activation(name).split(CHUNK_POSITIONS))


def _top_predictions(
    logits: Iterator[Float[Tensor, "some vocabulary"]], came: Int[Tensor, " position"], *, known: int, n: int
) -> tuple[Int[Tensor, "position guess"], Float[Tensor, "position guess"], Float[Tensor, " position"]]:
    """Returns the most likely ids, their probabilities and the probabilities of the actual tokens.

    Rows of the unembedding beyond the tokenizer's vocabulary (`known`) are never predicted.
    """
    parts = []
    for some, own in zip(logits, came.split(CHUNK_POSITIONS), strict=True):
        p = some.float().softmax(-1)
        best = p[:, :known].topk(min(n, known))
        parts.append((best.indices, best.values, p.gather(-1, own.to(p.device)[:, None])[:, 0]))
    ids, probabilities, of_came = (torch.cat(one) for one in zip(*parts, strict=True))
    return ids, probabilities, of_came
