"""What would the model say if it stopped here? The last norm and the unembedding, applied after every layer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.choices import Stack
from qkv.errors import InputError
from qkv.inspection.reading import label
from qkv.inspection.seeing import Seen, blocks_of
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.tensors import Logits, Residual
from qkv.text import Tokenizer
from qkv.text.showing import text_of


@dataclass(frozen=True, kw_only=True)
class LensView:
    """View F: depths × positions, the likeliest tokens at each. The last row is what the model really says."""

    depths: list[str]
    positions: list[str]
    """The tokens read. A GPT and a decoder guess what comes next, a BERT what stands there."""
    ids: Int[Tensor, "depth position guess"]
    probabilities: Float[Tensor, "depth position guess"]
    tokens: list[list[list[str]]]
    says_next: bool
    """Guesses are of what comes next; False: of what stands there."""
    wanted: list[str | None]
    """What really came next, or stands there."""
    wanted_probabilities: Float[Tensor, "depth position"]
    """Of what really came; NaN where that is open."""


def lens(seen: Seen, tokenizer: Tokenizer, *, n: int = 5) -> LensView:
    """Of a BERT through its masked-word head, of a translator through the decoder; an RNN has its last depth alone."""
    logits = _at_each_depth(seen)
    # A model may have more rows than its tokenizer has ids; those are no guesses.
    log_p = logits.float().log_softmax(-1)
    best = log_p[..., : tokenizer.vocabulary_size].topk(min(n, tokenizer.vocabulary_size))
    own = seen.reading.own
    wanted: list[int | None] = list(own.ids if seen.reading.chosen is None else seen.reading.chosen)
    wanted += [None] * (len(own.ids) - len(wanted))
    index = torch.tensor([0 if one is None else one for one in wanted], device=log_p.device)
    of_wanted = log_p.gather(-1, index.expand(len(logits), -1)[..., None])[..., 0].exp()
    of_wanted[:, [one is None for one in wanted]] = float("nan")
    return LensView(
        depths=depth_names(len(logits)), positions=own.labels, ids=best.indices, probabilities=best.values.exp(),
        tokens=[[[label(text_of(tokenizer, i)) for i in cell] for cell in row] for row in best.indices.tolist()],
        says_next=seen.reading.chosen is not None,
        wanted=[None if one is None else label(text_of(tokenizer, one)) for one in wanted],
        wanted_probabilities=of_wanted,
    )  # fmt: skip


@torch.no_grad()
def unembed(model: Model, states: Float[Tensor, "position d_model"]) -> Float[Tensor, "position vocabulary"]:
    """The logits that a residual stream gives through the last norm and head."""
    return _head(model, states[None])[0]


def _head(model: Model, states: Residual) -> Logits:
    match model:
        case GPT():
            return model.unembedding(model.final_norm(states))
        case BERT():
            return model.masked_word_logits(model.final_norm(states))
        case Seq2Seq():
            return model.unembedding(model.decoder.final_norm(states))
        case RNNSeq2Seq():
            raise InputError("an RNN has no residual stream to read between its layers")


def depth_names(n: int) -> list[str]:
    return ["output"] if n == 1 else ["embedding", *(f"after layer {layer}" for layer in range(n - 1))]


def stream_names(model: Model, stack: Stack) -> list[str]:
    """The taps of the residual stream before the first and after each layer."""
    prefix = {Stack.SELF: "", Stack.ENCODER: "encoder."}.get(stack, "decoder.")
    n = len(blocks_of(model, stack))
    return [f"{prefix}blocks.0.residual_pre", *(f"{prefix}blocks.{layer}.residual_post" for layer in range(n))]


def _at_each_depth(seen: Seen) -> Float[Tensor, "depth position vocabulary"]:
    if isinstance(seen.model, RNNSeq2Seq):
        assert seen.logits is not None
        return seen.logits[None]
    stack = Stack.DECODER if isinstance(seen.model, Seq2Seq) else Stack.SELF
    return torch.stack([unembed(seen.model, seen.stream(name)) for name in stream_names(seen.model, stack)])
