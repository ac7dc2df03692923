"""The CPU backend, which runs float32 and int8 models with prepacked weights."""

from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from qkv.accel.cpu.decode_engine import CPUDecodeEngine
from qkv.accel.cpu.encoder import CPUEncoder
from qkv.accel.cpu.onednn_linear import reason_onednn_is_unsupported
from qkv.accel.cpu.prepacked_decoder import prepacked_decoder
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.accel.int8 import Int8Linear
from qkv.accel.support import reason_modules_are_unsupported
from qkv.accel.swap import EngineWithModules
from qkv.choices import BackendName
from qkv.config import TrainingConfig
from qkv.errors import InputError
from qkv.generation.decode_engine import (
    DecodeEngine,
    GPTDecodeEngine,
    Seq2SeqDecodeEngine,
    eager_engine,
)
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn.positions import ConcatenatedSinusoidalPositions

SUPPORTED_LINEARS = (nn.Linear, Int8Linear)


@dataclass(frozen=True, eq=False)
class CPUBackend:
    """Backend for float32 and int8 models on a CPU.

    The packed copies of the weights are kept for as long as the model exists, because packing takes as long as a few
    decode steps. They are updated when a weight has changed.
    """

    name = BackendName.CPU
    device_type = "cpu"

    _lock: Lock = field(default_factory=Lock)
    _prepacked: WeakKeyDictionary[nn.Module, PrepackedWeights] = field(default_factory=WeakKeyDictionary)

    def supports(self, model: Model) -> str | None:
        """Return `None` if the backend can run the model, and otherwise the reason why it cannot."""
        if model.training:
            return "requires evaluation mode (model.eval())"
        match model:
            case RNNSeq2Seq():
                others = ((name, p.dtype) for name, p in model.named_parameters() if p.dtype != torch.float32)
                return next((f"requires float32 weights, but {name} is {dtype}" for name, dtype in others), None)
            case BERT():
                return self._reason_encoder_is_unsupported(model)
            case GPT():
                embedding, roots = model.embedding, [("", model)]
            case Seq2Seq():
                embedding = model.decoder.embedding
                roots = [("decoder", model.decoder), ("unembedding", model.unembedding)]
        if isinstance(embedding.position, ConcatenatedSinusoidalPositions):
            return "positions='concatenated' is not supported"
        return reason_modules_are_unsupported(roots, SUPPORTED_LINEARS, dtype=torch.float32)

    def supports_training(self, model: nn.Module, config: TrainingConfig) -> str | None:
        """Return `None` if oneDNN can be used to train the model, and otherwise the reason why it cannot."""
        return reason_onednn_is_unsupported(model, config)

    def decode_engine(self, model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine:
        eager = eager_engine(model, batch=batch, capacity=capacity)
        if isinstance(model, RNNSeq2Seq):
            modules = prepacked_decoder(model, self.prepacked_weights(model))
            return EngineWithModules(eager, modules, modules)
        assert isinstance(eager, GPTDecodeEngine | Seq2SeqDecodeEngine)
        return CPUDecodeEngine(model, eager, self.prepacked_weights(model))

    def encode_engine(self, model: BERT, *, compile: bool = False) -> CPUEncoder:  # noqa: A002 - torch's term
        if compile:
            raise InputError(
                "compilation requires a GPU and 16-bit weights; load the model with device='cuda', dtype='bfloat16'"
            )
        return CPUEncoder(model, self.prepacked_weights(model))

    def prepacked_weights(self, model: Model) -> PrepackedWeights:
        """Return the packed weights of a model, which are shared by all of its engines."""
        with self._lock:
            if model not in self._prepacked:
                self._prepacked[model] = PrepackedWeights()
            return self._prepacked[model]

    def _reason_encoder_is_unsupported(self, model: BERT) -> str | None:
        config = model.config
        if model.relative_positions is not None:
            return f"positions={config.positions.value!r} is not supported for an encoder"
        if config.sliding_window is not None:
            return "sliding_window is not supported for an encoder"
        if config.gated:
            return "gated=true is not supported for an encoder"
        if torch.is_grad_enabled():
            return "requires disabled gradients (torch.no_grad())"
        parts = ("embedding", "blocks", "final_norm", "last_hidden_state")
        roots = [(part, model.get_submodule(part)) for part in parts]
        return reason_modules_are_unsupported(roots, SUPPORTED_LINEARS, dtype=torch.float32)
