"""Run a model on one text, with or without a KV cache, and store its activations."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import AttentionStack
from qkv.errors import ConfigError, InputError
from qkv.inspection.model_input import ModelInput, TokenizedText
from qkv.inspection.record import ActivationRecord, AttentionRecord, record
from qkv.inspection.short_repr import ShortRepr
from qkv.inspection.validation import check_index
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import Attention, Block

LayerHeadWeights = Float[Tensor, "layer head query key"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ActivationCache(ShortRepr):
    """The activations from one forward pass or from several decode steps.

    All tensors belong to a single text and have no batch dimension.
    """

    model: Model
    model_input: ModelInput
    activations: ActivationRecord
    logits: Float[Tensor, "position vocabulary"] | None
    """The logits at every position, or `None` for a BERT without a masked-word head."""

    @property
    def stacks(self) -> list[AttentionStack]:
        match self.model:
            case GPT() | BERT():
                return [AttentionStack.SELF]
            case Seq2Seq():
                return [AttentionStack.ENCODER, AttentionStack.DECODER, AttentionStack.CROSS]
            case RNNSeq2Seq():
                return [] if self.model.decoder.attention is None else [AttentionStack.CROSS]

    def n_layers(self, stack: AttentionStack) -> int:
        self._check_stack(stack)
        return 1 if isinstance(self.model, RNNSeq2Seq) else len(get_blocks(self.model, stack))

    def weights(self, stack: AttentionStack, layer: int) -> Float[Tensor, "head query key"]:
        """Return one layer's attention weights.

        The rows from successive decode steps are concatenated. Keys that did not exist yet at a step have weight 0.
        """
        return self._concatenate_passes(stack, layer, "weights", fill_value=0.0)

    def scores(self, stack: AttentionStack, layer: int) -> Float[Tensor, "head query key"]:
        """Return one layer's attention scores before the softmax, with −∞ at masked positions."""
        return self._concatenate_passes(stack, layer, "scores", fill_value=float("-inf"))

    def all_weights(self, stack: AttentionStack) -> LayerHeadWeights:
        """Return the attention weights of all layers."""
        return torch.stack([self.weights(stack, layer) for layer in range(self.n_layers(stack))])

    def mean_weights(self, stack: AttentionStack) -> Float[Tensor, "layer query key"]:
        """Return the attention weights of all layers, averaged over heads.

        Only one layer's unaveraged weights are in memory at a time.
        """
        return torch.stack([self.weights(stack, layer).mean(0) for layer in range(self.n_layers(stack))])

    def visible_mask(self, stack: AttentionStack) -> Bool[Tensor, "query key"]:
        """Return a mask of the keys that each query may attend to in at least one head of the first layer."""
        return (self.scores(stack, 0) > float("-inf")).any(0)

    def get_activation(self, name: str) -> Float[Tensor, "position width"]:
        """Return the activations recorded at a tap, concatenated over all forward passes."""
        return torch.cat([self.activations.get_pass(name, i)[0] for i in range(self.activations.n_passes(name))])

    def attention_records(self, stack: AttentionStack, layer: int) -> list[AttentionRecord]:
        """Return the attention records of a layer, with one record per forward pass."""
        name = self.attention_tap(stack, layer)
        return [self.activations.attention(name, i) for i in range(self.activations.n_passes(f"{name}.weights"))]

    def attention_tap(self, stack: AttentionStack, layer: int) -> str:
        """Return the name of a layer's attention module, such as `blocks.0.attention`."""
        return attention_module_name(
            self.model, stack, check_index("layer", layer, self.n_layers(stack), unit="layers")
        )

    def key_labels(self, stack: AttentionStack) -> list[str]:
        """Return the labels of the keys."""
        return self.attention_axis_tokens(stack, is_key=True).labels

    def query_labels(self, stack: AttentionStack) -> list[str]:
        """Return the labels of the queries."""
        return self.attention_axis_tokens(stack).labels

    def attention_axis_tokens(self, stack: AttentionStack, *, is_key: bool = False) -> TokenizedText:
        """Return the query or key tokens. See `ModelInput.attention_axis_tokens`."""
        return self.model_input.attention_axis_tokens(stack, is_key=is_key)

    @property
    def attention_reconstruction_error(self) -> float:
        """The largest value of max|A·V − output| over all attention layers.

        This value indicates how far the recomputed weights A deviate from the weights that the kernel used.
        """
        if isinstance(self.model, RNNSeq2Seq):
            return 0.0  # an RNN's weights are recorded, not recomputed
        records = (
            record
            for stack in self.stacks
            for layer in range(self.n_layers(stack))
            for record in self.attention_records(stack, layer)
        )
        return max(record.reconstruction_error for record in records)

    def _concatenate_passes(self, stack: AttentionStack, layer: int, tap: str, *, fill_value: float) -> Tensor:
        name = f"{self.attention_tap(stack, layer)}.{tap}"
        passes = [upcast(self.activations.get_pass(name, i)[0]) for i in range(self.activations.n_passes(name))]
        n_keys = max(rows.shape[-1] for rows in passes)
        return torch.cat([F.pad(rows, (0, n_keys - rows.shape[-1]), value=fill_value) for rows in passes], dim=1)

    def _check_stack(self, stack: AttentionStack) -> None:
        if stack not in self.stacks:
            available = ", ".join(self.stacks) or "none"
            raise InputError(f"stack must be one of {available}, got '{stack}'")


def upcast(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 unless it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def attention_module_name(model: Model, stack: AttentionStack, layer: int | Literal["*"]) -> str:
    match stack:
        case AttentionStack.SELF:
            return f"blocks.{layer}.attention"
        case AttentionStack.ENCODER | AttentionStack.DECODER:
            return f"{stack}.blocks.{layer}.attention"
        case AttentionStack.CROSS:
            return "decoder.attention" if isinstance(model, RNNSeq2Seq) else f"decoder.blocks.{layer}.cross_attention"


def get_blocks(model: Model, stack: AttentionStack) -> list[Block]:
    """Return the blocks that contain the given kind of attention."""
    match model:
        case GPT() | BERT():
            modules = model.blocks
        case Seq2Seq():
            modules = (model.encoder if stack is AttentionStack.ENCODER else model.decoder).blocks
        case RNNSeq2Seq():
            raise InputError("a Transformer is required because an RNN has no residual stream and no layers of heads")
    return [block for block in modules if isinstance(block, Block)]


def get_attention(model: Model, stack: AttentionStack, layer: int) -> Attention:
    blocks = get_blocks(model, stack)
    block = blocks[check_index("layer", layer, len(blocks), unit="layers")]
    attention = block.cross_attention if stack is AttentionStack.CROSS else block.attention
    assert attention is not None
    return attention


@torch.no_grad()
def run_with_cache(model: Model, model_input: ModelInput, *, prefill_length: int | None = None) -> ActivationCache:
    """Run the model on one text, and return its activations.

    If `prefill_length` is set, the first `prefill_length` tokens are processed in one pass and the others one at a time
    with a KV cache, like during generation. Dropout is disabled during the run.
    """
    n = len(model_input.sequence.ids)
    if prefill_length is not None and not 1 <= prefill_length <= n:
        raise InputError(f"prefill_length must be between 1 and the number of tokens ({n}), got {prefill_length}")
    was_training = model.training
    model.eval()
    try:
        with record(model, *_tap_patterns(model)) as activations:
            logits = (
                forward_logits(model, model_input)
                if prefill_length is None
                else _forward_with_kv_cache(model, model_input, prefill_length)
            )
    finally:
        model.train(was_training)
    return ActivationCache(model=model, model_input=model_input, activations=activations, logits=logits)


def forward_logits(model: Model, model_input: ModelInput) -> Float[Tensor, "position vocabulary"] | None:
    """Run one forward pass, and return all logits, or `None` for a BERT without a masked-word head."""
    ids = _ids_tensor(model, model_input.sequence.ids)
    match model:
        case GPT():
            return model(ids)[0]
        case BERT():
            segments = None if model_input.segments is None else _ids_tensor(model, model_input.segments)
            states = model(ids, segments=segments)
            return None if model.masked_lm is None else model.masked_lm_logits(states)[0]
        case Seq2Seq() | RNNSeq2Seq():
            assert model_input.source is not None
            return model(_ids_tensor(model, model_input.source.ids), ids)[0]


def _forward_with_kv_cache(
    model: Model, model_input: ModelInput, n_prefill: int
) -> Float[Tensor, "position vocabulary"]:
    ids = _ids_tensor(model, model_input.sequence.ids)
    chunks = [ids[:, :n_prefill], *ids[:, n_prefill:].split(1, dim=1)] if n_prefill < ids.shape[1] else [ids]
    match model:
        case GPT():
            cache = model.new_cache(batch=1, capacity=ids.shape[1])
            logits = [model(chunk, cache=cache) for chunk in chunks]
        case BERT():
            raise ConfigError("prefill_length requires a KV cache, which a BERT does not have")
        case Seq2Seq():
            assert model_input.source is not None
            source = model.encode(_ids_tensor(model, model_input.source.ids))
            cache = model.new_cache(batch=1, capacity=ids.shape[1])
            logits = [model.decode(chunk, source, cache=cache) for chunk in chunks]
        case RNNSeq2Seq():
            assert model_input.source is not None
            encoded = model.encode(_ids_tensor(model, model_input.source.ids))
            state, logits = encoded.state, []
            for chunk in chunks:
                step_logits, state = model.decode(chunk, encoded.source, state)
                logits.append(step_logits)
    return torch.cat(logits, dim=1)[0]


def _ids_tensor(model: Model, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=next(model.parameters()).device)


def _tap_patterns(model: Model) -> tuple[str, ...]:
    if not isinstance(model, RNNSeq2Seq):
        return ("*.weights", "*.resid_*", "*_out", "*embedding.sum")
    return ("*.states",) if model.decoder.attention is None else ("*.states", "*.scores", "*.weights")
