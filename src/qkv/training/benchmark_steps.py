"""Build randomly initialized models and steps that run them, for benchmarks and calibration."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import assert_never

import torch
from torch import Tensor, nn

from qkv.config import ModelConfig, TrainingConfig
from qkv.cost.workload import Mode, Precision, Workload
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq, build
from qkv.nn import Attention, KVCache, LayerNorm, RMSNorm
from qkv.training.losses import cross_entropy_sum
from qkv.training.optimizer import build_optimizers

Step = Callable[[], object]
INIT_STD = 0.02
"""Standard deviation of the random weights, which is typical of trained models."""


def build_random_model(config: ModelConfig, device: torch.device, dtype: Precision) -> Model:
    """Build a model with random weights that are initialized directly on the device. Tied weights stay tied."""
    with torch.device("meta"):
        model = build(config)
    new_parameters: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in new_parameters:
                empty = torch.empty(parameter.shape, device=device, dtype=parameter_dtype(dtype))
                is_norm_weight = isinstance(part, LayerNorm | RMSNorm) and name == "weight"
                new_parameters[id(parameter)] = nn.Parameter(
                    empty.fill_(1.0) if is_norm_weight else empty.normal_(std=INIT_STD)
                )
            setattr(part, name, new_parameters[id(parameter)])
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
    return model


def parameter_dtype(precision: Precision) -> torch.dtype:
    match precision:
        case Precision.FLOAT16:
            return torch.float16
        case Precision.BFLOAT16:
            return torch.bfloat16
        case Precision.FLOAT32 | Precision.MIXED:
            return torch.float32


def configure_model_and_build_step(model: Model, work: Workload) -> Step:
    """Configure the model for the workload and return a function that runs one step.

    This sets the model's attention kernel and its training or evaluation mode.
    """
    work.check_supported_by(model.config)
    for part in model.modules():
        if isinstance(part, Attention):
            part.kernel = work.kernel
    model.train(work.mode is Mode.TRAIN)
    if work.mode is Mode.TRAIN:
        return _build_training_step(model, work)
    run = _build_decode_step(model, work) if work.mode is Mode.DECODE else _build_forward_pass(model, work)

    def step() -> object:
        with torch.inference_mode():
            return run()

    return step


def build_loss(model: Model, work: Workload) -> Callable[[], Tensor]:
    """Return a function that computes the mean loss for random ids, which is the forward pass of a training step."""
    run, device = _build_forward_pass(model, work), _model_device(model)
    is_mixed = work.dtype is Precision.MIXED

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16) if is_mixed else nullcontext():
            total = torch.zeros((), device=device)
            for outputs in run():
                n_targets = outputs[..., 0].numel()
                targets = torch.zeros(outputs.shape[:-1], dtype=torch.long, device=device)
                total = total + cross_entropy_sum(outputs, targets) / n_targets
            return total

    return loss


def build_loss_and_backward_step(model: Model, work: Workload) -> Step:
    """Return a function that runs the forward and backward passes of a training step without the optimizer update."""
    loss, parameters = build_loss(model, work), list(model.parameters())

    def step() -> None:
        loss().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def _build_training_step(model: Model, work: Workload) -> Step:
    """Return a function that runs a full training step as the trainer does: loss, gradients, clipping and AdamW."""
    loss = build_loss(model, work)
    parameters = list(model.parameters())
    optimizers = build_optimizers(model, TrainingConfig(steps=1000, batch_size=work.batch_size, seq_len=work.seq_len))

    def step() -> float:
        value = loss()
        value.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        values = torch.stack((value.detach(), norm.float())).tolist()
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return values[0]

    return step


def _model_device(model: Model) -> torch.device:
    return next(model.parameters()).device


def _random_ids(model: Model, batch: int, n: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (batch, n), device=_model_device(model))


def _random_source(model: Seq2Seq | RNNSeq2Seq, work: Workload) -> Tensor:
    if isinstance(model, Seq2Seq) and model.config.d_patch is not None:
        return torch.rand(work.batch_size, work.n_source, model.config.d_patch, device=_model_device(model))
    return _random_ids(model, work.batch_size, work.n_source, model.config.source_vocab_size)


def _build_forward_pass(model: Model, work: Workload) -> Callable[[], list[Tensor]]:
    """Return a function that runs one pass over full sequences and returns the output of every model head."""
    config = model.config
    ids = _random_ids(model, work.batch_size, work.seq_len, config.vocab_size)
    is_prefill = work.mode is Mode.PREFILL
    n_positions = work.logits_to_keep or work.seq_len
    match model:
        case GPT():
            cache = model.new_cache(batch=work.batch_size, capacity=work.seq_len) if is_prefill else None
            return lambda: [model.unembedding(model.hidden_states(ids, cache=_reset_cache(cache))[:, -n_positions:])]
        case BERT():
            return lambda: _bert_head_outputs(model, ids, n_positions)
        case Seq2Seq():
            source = _random_source(model, work)
            cache = model.new_cache(batch=work.batch_size, capacity=work.seq_len) if is_prefill else None

            def encode_and_decode() -> list[Tensor]:
                encoded = model.encode(source)
                states = model.hidden_states(ids, encoded, cache=_reset_cache(cache))
                return [model.unembedding(states[:, -n_positions:])]

            return encode_and_decode
        case RNNSeq2Seq():
            source = _random_source(model, work)
            return lambda: [model(source, ids)]
        case _:
            assert_never(model)


def _bert_head_outputs(model: BERT, ids: Tensor, n_masked_lm_positions: int) -> list[Tensor]:
    states, config = model(ids), model.config
    outputs = []
    if config.masked_lm_head:
        outputs.append(model.masked_lm_logits(states[:, -n_masked_lm_positions:]))
    if config.next_sentence_head:
        outputs.append(model.next_sentence_logits(states))
    if config.n_classes is not None:
        outputs.append(model.class_logits(states))
    elif config.pooler and not config.next_sentence_head:
        outputs.append(model.pooled_output(states))
    return outputs or [states[:, 0]]


def _reset_cache(cache: KVCache | None) -> KVCache | None:
    if cache is not None:
        _set_cache_length(cache, 0)
        for source in cache.sources:
            source.keys_values = None
    return cache


def _set_cache_length(cache: KVCache, n: int) -> None:
    cache.n_filled = n
    cache.lengths = torch.full_like(cache.lengths, n)


@torch.inference_mode()
def _build_decode_step(model: Model, work: Workload) -> Callable[[], Tensor]:
    """Return a function that decodes one token per row with seq_len − 1 tokens in the cache."""
    ids = _random_ids(model, work.batch_size, 1, model.config.vocab_size)
    match model:
        case GPT():
            cache = _randomize_keys_and_values(model.new_cache(batch=work.batch_size, capacity=work.seq_len))
            decode = lambda: model(ids, cache=cache)  # noqa: E731
        case Seq2Seq():
            source = model.encode(_random_source(model, work))
            cache = _randomize_keys_and_values(model.new_cache(batch=work.batch_size, capacity=work.seq_len))
            model.decode(ids, source, cache=cache)
            decode = lambda: model.decode(ids, source, cache=cache)  # noqa: E731
        case RNNSeq2Seq():
            start = model.encode(_random_source(model, work))
            return lambda: model.decode(ids, start.source, start.state)[0]
        case _:
            raise AssertionError("BERT cannot decode; Workload.check_supported_by rejects it")

    def step() -> Tensor:
        _set_cache_length(cache, work.seq_len - 1)
        return decode()

    return step


def _randomize_keys_and_values(cache: KVCache) -> KVCache:
    """Fill the cache with random keys and values.

    Pages of zeros may not be allocated in physical memory until they are written.
    """
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache
