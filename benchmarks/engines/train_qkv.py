"""Run training steps with the qkv Trainer, including its log entries."""

from itertools import count
from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.engines.next_token_workload import TrainingEngine, Workload, serve_training
from benchmarks.engines.protocol import MissingPeerError, temporary_folder
from qkv.choices import Activation, ScheduleKind
from qkv.cli.process import retain_freed_memory
from qkv.config import GPTConfig, TrainingConfig
from qkv.data.token_batches import TokenBatch
from qkv.errors import ConfigError
from qkv.models import GPT
from qkv.training import Trainer, TrainingData
from qkv.training.checkpoint import RunFolder
from qkv.training.gpt import next_token_objective
from qkv.training.step import build_train_step
from qkv.weights.model_loader import load_published_weights


def build(workload: Workload, options: dict[str, Any]) -> TrainingEngine:
    model = GPT(model_config(workload)).train()
    load_published_weights(model, workload.initial_weights())
    model.to(workload.device)
    training = TrainingConfig(
        steps=10**9,
        batch_size=workload.batch,
        seq_len=workload.length,
        learning_rate=workload.learning_rate,
        schedule=ScheduleKind.CONSTANT,
        warmup_steps=0,
        weight_decay=workload.weight_decay,
        beta1=workload.beta1,
        beta2=workload.beta2,
        max_grad_norm=workload.max_grad_norm,
        **options,
    )
    try:
        train_step = build_train_step(model, training, lambda: next_token_objective(model, training))
    except ConfigError as error:
        raise MissingPeerError(str(error)) from None  # bfloat16 on a CPU that has no bfloat16 instructions
    retain_freed_memory()  # as the command line does
    losses: list[float] = []
    trainer = Trainer(
        train_step,
        data=TrainingData(batch=_no_batch),
        run=RunFolder(temporary_folder()),
        texts={},
        report=lambda entry: losses.append(entry["loss"]),
    )
    counts = torch.full((workload.batch,), workload.length)

    numbers = count()

    def step(ids: Tensor, targets: Tensor) -> int:
        trainer.run_step(TokenBatch(ids, targets, None, counts))
        return next(numbers)

    def read(number: int) -> float:
        trainer.flush_metrics()
        return losses[number]

    return TrainingEngine(step=step, versions={"qkv": qkv.__version__}, read=read)


def model_config(workload: Workload) -> GPTConfig:
    return GPTConfig(
        vocab_size=workload.vocab_size,
        context_length=workload.context_length,
        d_model=workload.d_model,
        n_heads=workload.n_heads,
        n_layers=workload.n_layers,
        attention_bias=workload.bias,
        feed_forward_bias=workload.bias,
        norm_bias=workload.bias,
        activation=Activation.GELU,
    )


def _no_batch(t: int) -> TokenBatch:
    raise AssertionError(f"the trainer requested batch {t}, but the benchmark passes the batches itself")


if __name__ == "__main__":
    serve_training(build)
