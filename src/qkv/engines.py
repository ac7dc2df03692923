"""The seam between the reference implementation and the fast paths in `accel`.

Only this module imports `accel`. It offers two kinds of entry points. An engine replaces the forward pass of a whole
model: `decode_engine` generates tokens, and `encode_engine` encodes texts. `accelerated` replaces single modules of a
model by faster ones that share their parameters. A `backend` of `"eager"` selects the reference implementation, which
supports every model.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from qkv.accel.cpu.backend import CPUBackend
from qkv.accel.cpu.onednn_linear import onednn_replacement_finder
from qkv.accel.cuda.backend import CUDABackend
from qkv.accel.cuda.fused_modules import find_fused_loss, find_fused_replacement
from qkv.accel.cuda.graph_step import CUDAGraphStep
from qkv.accel.int8 import check_int8_supported, quantize_linears_to_int8
from qkv.accel.swap import ModuleSwap
from qkv.choices import BackendName
from qkv.config import TrainingConfig
from qkv.data.sampler import batch_by_length
from qkv.errors import InputError
from qkv.generation.decode_engine import DecodeEngine, TokenLists, eager_engine, right_pad_sequences
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.tensors import Residual

__all__ = [
    "BACKENDS",
    "Backend",
    "CUDAGraphStep",
    "EncodeEngine",
    "accelerated",
    "check_backend_runs_on_device",
    "check_int8_supported",
    "decode_engine",
    "encode_engine",
    "explain_backends",
    "explain_training_backends",
    "find_fused_loss",
    "quantize_linears_to_int8",
    "reason_unsupported",
    "select_backend",
    "select_training_backend",
]

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 1 << 16
"""Maximum number of tokens, including padding, in a batch of the eager encoder.

On a CPU, small batches are fastest because their activations fit into the cache.
"""


@runtime_checkable
class EncodeEngine(Protocol):
    """Computes the final states of texts with a BERT."""

    def group(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of the texts to encode together, given the lengths of all texts."""
        ...

    def encode(self, ids: TokenLists, segments: TokenLists | None = None) -> Residual:
        """Return the final states of a group of texts, with shape (text, position, d_model), padded on the right."""
        ...


@runtime_checkable
class Backend(Protocol):
    """An implementation of the forward passes of some models."""

    @property
    def name(self) -> str: ...

    @property
    def device_type(self) -> str | None:
        """The type of the devices that the backend runs on, or `None` if it runs on all devices."""
        ...

    def supports(self, model: Model) -> str | None:
        """Return `None` if the backend can run the model in its present state, and otherwise the reason.

        The model must be on a device of type `device_type`, which `reason_unsupported` checks first.
        """
        ...

    def supports_training(self, model: nn.Module, config: TrainingConfig) -> str | None:
        """Return `None` if the backend can train the model with these settings, and otherwise the reason.

        The model must be on a device of type `device_type`.
        """
        ...

    def decode_engine(self, model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine: ...

    def encode_engine(self, model: BERT, *, compile: bool = False) -> EncodeEngine:  # noqa: A002 - torch's term
        """Return an encoder. `compile` makes later batches faster, but the first batch of each size much slower."""
        ...


class EagerBackend:
    """The reference implementation, which runs the `forward` methods of the models."""

    name = BackendName.EAGER
    device_type = None

    def supports(self, model: Model) -> str | None:  # noqa: ARG002
        return None

    def supports_training(self, model: nn.Module, config: TrainingConfig) -> str | None:  # noqa: ARG002
        return None

    def decode_engine(self, model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int) -> DecodeEngine:
        return eager_engine(model, batch=batch, capacity=capacity)

    def encode_engine(self, model: BERT, *, compile: bool = False) -> EncodeEngine:  # noqa: A002
        if compile:
            raise InputError(
                "compilation requires a GPU and 16-bit weights; load the model with device='cuda', dtype='bfloat16'"
            )
        return EagerEncoder(model)


class EagerEncoder:
    """Encoder that pads the texts of a batch to the same length."""

    def __init__(self, model: BERT) -> None:
        self._model = model
        self._device = model.embedding.token.weight.device

    def group(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return batch_by_length(lengths, CPU_BATCH_TOKENS if self._device.type == "cpu" else GPU_BATCH_TOKENS)

    def encode(self, ids: TokenLists, segments: TokenLists | None = None) -> Residual:
        config = self._model.config
        padded_ids, attention_mask = right_pad_sequences(ids, self._device, config.vocab_size)
        padded_segments = None
        if segments is not None:
            padded_segments = right_pad_sequences(segments, self._device, config.n_segments)[0]
        return self._model(padded_ids, segments=padded_segments, attention_mask=attention_mask)


BACKENDS: tuple[Backend, ...] = (CUDABackend(), CPUBackend(), EagerBackend())
"""All backends, fastest first. With `backend="auto"`, the first one that supports the model runs it."""


def select_backend(model: Model, backend: str = BackendName.AUTO) -> Backend:
    """Return the backend with this name, or the fastest one that supports the model.

    Raises `InputError` if the named backend does not support the model.
    """
    return _select_backend(lambda candidate: reason_unsupported(candidate, model), backend)


def select_training_backend(model: nn.Module, config: TrainingConfig, backend: str = BackendName.AUTO) -> Backend:
    """Return the backend with this name, or the fastest one that can train the model with these settings."""
    return _select_backend(lambda candidate: _reason_training_unsupported(candidate, model, config), backend)


def explain_backends(model: Model, backend: str = BackendName.AUTO) -> tuple[str, dict[str, str]]:
    """Return the name of the selected backend, and for each faster backend the reason why it is not used."""
    return _explain_backends(lambda candidate: reason_unsupported(candidate, model), backend)


def explain_training_backends(
    model: nn.Module, config: TrainingConfig, backend: str = BackendName.AUTO
) -> tuple[str, dict[str, str]]:
    """Return the same as `explain_backends`, but for training."""
    return _explain_backends(lambda candidate: _reason_training_unsupported(candidate, model, config), backend)


def reason_unsupported(backend: Backend, model: Model) -> str | None:
    """Return why the backend cannot run the model in its present state on its present device, or `None` if it can."""
    return _reason_not_on_device(backend, next(model.parameters()).device) or backend.supports(model)


def check_backend_runs_on_device(backend: str, device: torch.device) -> None:
    """Raise `InputError` if the named backend cannot run any model on this device."""
    _select_backend(lambda candidate: _reason_not_on_device(candidate, device), backend)


def _reason_training_unsupported(backend: Backend, model: nn.Module, config: TrainingConfig) -> str | None:
    reason = _reason_not_on_device(backend, next(model.parameters()).device)
    return reason or backend.supports_training(model, config)


def _reason_not_on_device(backend: Backend, device: torch.device) -> str | None:
    if backend.device_type in (None, device.type):
        return None
    if backend.device_type == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU on this machine"
    return f"the model is on {device}, not on {'an NVIDIA GPU' if backend.device_type == 'cuda' else 'a CPU'}"


def _select_backend(reason_against: Callable[[Backend], str | None], backend: str) -> Backend:
    if backend == BackendName.AUTO:
        return next(candidate for candidate in BACKENDS if reason_against(candidate) is None)
    named = next((candidate for candidate in BACKENDS if candidate.name == backend), None)
    if named is None:
        raise InputError(f"--backend {backend}: must be one of {', '.join(BackendName)}")
    if (reason := reason_against(named)) is not None:
        raise InputError(f"--backend {backend}: {reason}")
    return named


def _explain_backends(reason_against: Callable[[Backend], str | None], backend: str) -> tuple[str, dict[str, str]]:
    selected, reasons = _select_backend(reason_against, backend), dict[str, str]()
    for candidate in BACKENDS[: BACKENDS.index(selected)]:
        is_auto = backend == BackendName.AUTO
        reason = reason_against(candidate) if is_auto else f"not selected by --backend {backend}"
        assert reason is not None, "auto selects the first backend that supports the model"
        reasons[candidate.name] = reason
    return selected.name, reasons


def decode_engine(
    model: GPT | Seq2Seq | RNNSeq2Seq, *, batch: int, capacity: int, backend: str = BackendName.AUTO
) -> DecodeEngine:
    """Create an engine that generates tokens for `batch` sequences of at most `capacity` tokens.

    Pass `functools.partial(decode_engine, backend=…)` as `create_engine` to the functions in `generation`.
    """
    with torch.inference_mode():
        return select_backend(model, backend).decode_engine(model, batch=batch, capacity=capacity)


def encode_engine(model: BERT, *, backend: str = BackendName.AUTO, compile: bool = False) -> EncodeEngine:  # noqa: A002
    """Create an encoder that computes the final states of texts. See `Backend.encode_engine` for `compile`."""
    return select_backend(model, backend).encode_engine(model, compile=compile)


def accelerated(model: nn.Module, mode: Literal["train", "inference"]) -> ModuleSwap:
    """Return a context manager that replaces modules of the model by faster ones for the device it is on now.

    Only modules whose class is exactly that of the reference are replaced, and both share their parameters and names.
    Results differ only by rounding. Keep the returned object if the model is compiled or entered repeatedly.
    """
    match next(model.parameters()).device.type, mode:
        case "cuda", _:
            return ModuleSwap(model, find_fused_replacement)
        case "cpu", "train":
            return ModuleSwap(model, onednn_replacement_finder(model))
        case _:
            return ModuleSwap(model, lambda _module: None)
