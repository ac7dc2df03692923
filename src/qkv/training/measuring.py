"""A model of random weights, run as a workload says: what `qkv cost --measure` and the calibration time."""

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
SPREAD = 0.02
"""Of the random weights: values of a trained model's size."""


def random_model(config: ModelConfig, device: torch.device, dtype: Precision) -> Model:
    """Weights are drawn on the device itself; tied ones stay tied."""
    with torch.device("meta"):
        model = build(config)
    made: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, device=device, dtype=torch_dtype(dtype))
                is_gain = isinstance(part, LayerNorm | RMSNorm) and name == "weight"
                made[id(parameter)] = nn.Parameter(empty.fill_(1.0) if is_gain else empty.normal_(std=SPREAD))
            setattr(part, name, made[id(parameter)])
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
    return model


def torch_dtype(dtype: Precision) -> torch.dtype:
    match dtype:
        case Precision.FLOAT16:
            return torch.float16
        case Precision.BFLOAT16:
            return torch.bfloat16
        case Precision.FLOAT32 | Precision.MIXED:
            return torch.float32


def step_of(model: Model, work: Workload) -> Step:
    """One step of this work, to be called again and again."""
    work.check(model.config)
    for part in model.modules():
        if isinstance(part, Attention):
            part.kernel = work.kernel
    model.train(work.mode is Mode.TRAIN)
    if work.mode is Mode.TRAIN:
        return _training_step(model, work)
    run = _decode(model, work) if work.mode is Mode.DECODE else _pass(model, work)

    def step() -> object:
        with torch.inference_mode():
            return run()

    return step


def loss_of(model: Model, work: Workload) -> Callable[[], Tensor]:
    """The forward half of a training step: the loss a target of random ids."""
    run, device = _pass(model, work), _device(model)
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


def gradients_of(model: Model, work: Workload) -> Step:
    """A training step without its update."""
    loss, own = loss_of(model, work), list(model.parameters())

    def step() -> None:
        loss().backward()
        for parameter in own:
            parameter.grad = None

    return step


def _training_step(model: Model, work: Workload) -> Step:
    """As the trainer does it: loss, gradients, their norm looked at and clipped, AdamW."""
    loss = loss_of(model, work)
    own = list(model.parameters())
    optimizers = build_optimizers(model, TrainingConfig(steps=1000, batch_size=work.batch, seq_len=work.length))

    def step() -> float:
        value = loss()
        value.backward()
        norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None], foreach=True)
        seen = torch.stack((value.detach(), norm.float())).tolist()
        nn.utils.clip_grads_with_norm_(own, 1.0, norm, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return seen[0]

    return step


def _device(model: Model) -> torch.device:
    return next(model.parameters()).device


def _ids(model: Model, batch: int, n: int, n_words: int) -> Tensor:
    return torch.randint(n_words, (batch, n), device=_device(model))


def _source(model: Seq2Seq | RNNSeq2Seq, work: Workload) -> Tensor:
    if isinstance(model, Seq2Seq) and model.config.d_patch is not None:
        return torch.rand(work.batch, work.n_source, model.config.d_patch, device=_device(model))
    return _ids(model, work.batch, work.n_source, model.config.source_vocab_size)


def _pass(model: Model, work: Workload) -> Callable[[], list[Tensor]]:
    """One pass over whole sequences; every head of the model gives its output."""
    config = model.config
    ids = _ids(model, work.batch, work.length, config.vocab_size)
    is_kept = work.mode is Mode.PREFILL
    asked = work.predictions or work.length
    match model:
        case GPT():
            cache = model.new_cache(batch=work.batch, capacity=work.length) if is_kept else None
            return lambda: [model.unembedding(model.states(ids, cache=_emptied(cache))[:, -asked:])]
        case BERT():
            return lambda: _bert_outputs(model, ids, asked)
        case Seq2Seq():
            source = _source(model, work)
            kept = model.new_cache(batch=work.batch, capacity=work.length) if is_kept else None

            def both() -> list[Tensor]:
                read = model.encode(source)
                states = model.states(ids, read, cache=_emptied(kept))
                return [model.unembedding(states[:, -asked:])]

            return both
        case RNNSeq2Seq():
            source = _source(model, work)
            return lambda: [model(source, ids)]
        case _:
            assert_never(model)


def _bert_outputs(model: BERT, ids: Tensor, asked: int) -> list[Tensor]:
    states, config = model(ids), model.config
    outputs = []
    if config.masked_word_head:
        outputs.append(model.masked_word_logits(states[:, -asked:]))
    if config.next_sentence_head:
        outputs.append(model.next_sentence_logits(states))
    if config.n_classes is not None:
        outputs.append(model.class_logits(states))
    elif config.pooler and not config.next_sentence_head:
        outputs.append(model.pooled(states))
    return outputs or [states[:, 0]]


def _emptied(cache: KVCache | None) -> KVCache | None:
    if cache is not None:
        _set_back(cache, 0)
        for source in cache.sources:
            source.kept = None
    return cache


def _set_back(cache: KVCache, n: int) -> None:
    cache.n_filled = n
    cache.lengths = torch.full_like(cache.lengths, n)


@torch.inference_mode()
def _decode(model: Model, work: Workload) -> Callable[[], Tensor]:
    """One token a row, after length − 1 that stand in the cache."""
    ids = _ids(model, work.batch, 1, model.config.vocab_size)
    match model:
        case GPT():
            cache = _filled(model.new_cache(batch=work.batch, capacity=work.length))
            read = lambda: model(ids, cache=cache)  # noqa: E731
        case Seq2Seq():
            source = model.encode(_source(model, work))
            cache = _filled(model.new_cache(batch=work.batch, capacity=work.length))
            model.decode(ids, source, cache=cache)
            read = lambda: model.decode(ids, source, cache=cache)  # noqa: E731
        case RNNSeq2Seq():
            start = model.encode(_source(model, work))
            return lambda: model.decode(ids, start.source, start.state)[0]
        case _:
            raise AssertionError("a BERT does not decode; Workload.check refuses it")

    def step() -> Tensor:
        _set_back(cache, work.length - 1)
        return read()

    return step


def _filled(cache: KVCache) -> KVCache:
    """With random keys and values: fresh zeros need not be in memory at all."""
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache
