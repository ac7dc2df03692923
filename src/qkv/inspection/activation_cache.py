"""One text seen passing through a model: in one pass, or token by token with the cache, to the same rows."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Stack
from qkv.errors import ConfigError, InputError
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.inspection.model_input import ModelInput, TokenizedText
from qkv.inspection.record import AttentionRecord, ActivationRecord, record
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Attention, Block

LayerHeadWeights = Float[Tensor, "layer head query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ActivationCache(ShortRepr):
    """What passed. All tensors are of this one text, without a batch axis."""

    model: Model
    model_input: ModelInput
    activations: ActivationRecord
    logits: Float[Tensor, "position vocabulary"] | None
    """None: of a BERT without a masked-word head."""

    @property
    def stacks(self) -> list[Stack]:
        match self.model:
            case GPT() | BERT():
                return [Stack.SELF]
            case Seq2Seq():
                return [Stack.ENCODER, Stack.DECODER, Stack.CROSS]
            case RNNSeq2Seq():
                return [] if self.model.decoder.attention is None else [Stack.CROSS]

    def n_layers(self, stack: Stack) -> int:
        self._check(stack)
        return 1 if isinstance(self.model, RNNSeq2Seq) else len(get_blocks(self.model, stack))

    def weights(self, stack: Stack, layer: int) -> Float[Tensor, "head query key"]:
        """Of one layer. Rows of a generation stand one under another; what was not there yet has weight 0."""
        return self._rows(stack, layer, "weights", filler=0.0)

    def scores(self, stack: Stack, layer: int) -> Float[Tensor, "head query key"]:
        """What the weights are the softmax of: −∞ where a look is forbidden."""
        return self._rows(stack, layer, "scores", filler=float("-inf"))

    def all_weights(self, stack: Stack) -> LayerHeadWeights:
        """All layers' weights."""
        return torch.stack([self.weights(stack, layer) for layer in range(self.n_layers(stack))])

    def mean_weights(self, stack: Stack) -> Float[Tensor, "layer query key"]:
        """All layers' weights, the mean of the heads; one layer's heads are held at a time."""
        return torch.stack([self.weights(stack, layer).mean(0) for layer in range(self.n_layers(stack))])

    def visible_mask(self, stack: Stack) -> Bool[Tensor, "query key"]:
        """Who may look at whom, in any head of the first layer."""
        return (self.scores(stack, 0) > float("-inf")).any(0)

    def get_activation(self, name: str) -> Float[Tensor, "position width"]:
        """What passed a tap, all positions of all passes."""
        return torch.cat([self.activations.at(name, i)[0] for i in range(self.activations.n_passes(name))])

    def attention_records(self, stack: Stack, layer: int) -> list[AttentionRecord]:
        """The attentions themselves, one a pass."""
        name = self.attention_tap(stack, layer)
        return [self.activations.attention(name, i) for i in range(self.activations.n_passes(f"{name}.weights"))]

    def attention_tap(self, stack: Stack, layer: int) -> str:
        """The attention's name in the model."""
        return attention_name(self.model, stack, check_index("layer", layer, self.n_layers(stack), of="layers"))

    def key_labels(self, stack: Stack) -> list[str]:
        """Labels of what is looked at."""
        return self.select_tokens(stack, is_key=True).labels

    def query_labels(self, stack: Stack) -> list[str]:
        """Labels of those who look."""
        return self.select_tokens(stack).labels

    def select_tokens(self, stack: Stack, *, is_key: bool = False) -> TokenizedText:
        """As `Reading.side`."""
        return self.model_input.select_tokens(stack, is_key=is_key)

    @property
    def error(self) -> float:
        """The greatest max|A·V − output| of all attentions: how far the weights shown are from what was computed."""
        if isinstance(self.model, RNNSeq2Seq):
            return 0.0  # its weights are the ones that were used
        looks = (
            one for stack in self.stacks for layer in range(self.n_layers(stack)) for one in self.attention_records(stack, layer)
        )
        return max(one.error for one in looks)

    def _rows(self, stack: Stack, layer: int, what: str, *, filler: float) -> Tensor:
        name = f"{self.attention_tap(stack, layer)}.{what}"
        passes = [upcast(self.activations.at(name, i)[0]) for i in range(self.activations.n_passes(name))]
        n_keys = max(rows.shape[-1] for rows in passes)
        return torch.cat([F.pad(rows, (0, n_keys - rows.shape[-1]), value=filler) for rows in passes], dim=1)

    def _check(self, stack: Stack) -> None:
        if stack not in self.stacks:
            has = ", ".join(self.stacks) or "none"
            raise InputError(f"this model has no attention '{stack}'; it has: {has}")


def upcast(passing: Tensor) -> Tensor:
    """In at least float32."""
    return passing if passing.dtype == torch.float64 else passing.float()


def attention_name(model: Model, stack: Stack, layer: int | Literal["*"]) -> str:
    match stack:
        case Stack.SELF:
            return f"blocks.{layer}.attention"
        case Stack.ENCODER | Stack.DECODER:
            return f"{stack}.blocks.{layer}.attention"
        case Stack.CROSS:
            return "decoder.attention" if isinstance(model, RNNSeq2Seq) else f"decoder.blocks.{layer}.cross_attention"


def get_blocks(model: Model, stack: Stack) -> list[Block]:
    """The layers that hold these attentions."""
    match model:
        case GPT() | BERT():
            found = model.blocks
        case Seq2Seq():
            found = (model.encoder if stack is Stack.ENCODER else model.decoder).blocks
        case RNNSeq2Seq():
            raise InputError("an RNN has no blocks: no residual stream, no heads of many layers")
    return [block for block in found if isinstance(block, Block)]


def get_attention(model: Model, stack: Stack, layer: int) -> Attention:
    blocks = get_blocks(model, stack)
    block = blocks[check_index("layer", layer, len(blocks), of="layers")]
    found = block.cross_attention if stack is Stack.CROSS else block.attention
    assert found is not None
    return found


@torch.no_grad()
def run_with_cache(model: Model, reading: ModelInput, *, cached_from: int | None = None) -> ActivationCache:
    """`cached_from`: so many tokens in one pass, the rest one at a time with the cache, as when generating.

    Dropout is off while looking.
    """
    n = len(reading.sequence.ids)
    if cached_from is not None and not 1 <= cached_from <= n:
        raise InputError(f"cached_from={cached_from} must be from 1 to the text's {n} tokens")
    was_training = model.training
    model.eval()
    try:
        with record(model, *_tap_patterns(model)) as trace:
            logits = forward_logits(model, reading) if cached_from is None else _forward_with_kv_cache(model, reading, cached_from)
    finally:
        model.train(was_training)
    return ActivationCache(model=model, model_input=reading, activations=trace, logits=logits)


def forward_logits(model: Model, reading: ModelInput) -> Float[Tensor, "position vocabulary"] | None:
    """One pass; the logits of every position."""
    ids = _ids_tensor(model, reading.sequence.ids)
    match model:
        case GPT():
            return model(ids)[0]
        case BERT():
            segments = None if reading.segments is None else _ids_tensor(model, reading.segments)
            states = model(ids, segments=segments)
            return None if model.masked_word is None else model.masked_word_logits(states)[0]
        case Seq2Seq() | RNNSeq2Seq():
            assert reading.source is not None
            return model(_ids_tensor(model, reading.source.ids), ids)[0]


def _forward_with_kv_cache(model: Model, reading: ModelInput, n_first: int) -> Float[Tensor, "position vocabulary"]:
    ids = _ids_tensor(model, reading.sequence.ids)
    parts = [ids[:, :n_first], *ids[:, n_first:].split(1, dim=1)] if n_first < ids.shape[1] else [ids]
    match model:
        case GPT():
            cache = model.new_cache(batch=1, capacity=ids.shape[1])
            logits = [model(part, cache=cache) for part in parts]
        case BERT():
            raise ConfigError("a BERT reads a text whole: it has no cache")
        case Seq2Seq():
            assert reading.source is not None
            source = model.encode(_ids_tensor(model, reading.source.ids))
            cache = model.new_cache(batch=1, capacity=ids.shape[1])
            logits = [model.decode(part, source, cache=cache) for part in parts]
        case RNNSeq2Seq():
            assert reading.source is not None
            start = model.encode(_ids_tensor(model, reading.source.ids))
            state, logits = start.state, []
            for part in parts:
                own, state = model.decode(part, start.source, state)
                logits.append(own)
    return torch.cat(logits, dim=1)[0]


def _ids_tensor(model: Model, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=next(model.parameters()).device)


def _tap_patterns(model: Model) -> tuple[str, ...]:
    if not isinstance(model, RNNSeq2Seq):
        return ("*.weights", "*.resid_*", "*_out", "*embedding.sum")
    return ("*.states",) if model.decoder.attention is None else ("*.states", "*.scores", "*.weights")
