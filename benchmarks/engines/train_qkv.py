"""Our training step: the Trainer's own, its log line included."""

from itertools import count
from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.engines.next_token_work import Built, Work, serve_training
from benchmarks.engines.speaking import MissingPeerError, scratch_folder
from qkv.choices import Activation, ScheduleKind
from qkv.config import GPTConfig, TrainingConfig
from qkv.data.token_batches import TokenBatch
from qkv.errors import ConfigError
from qkv.models import GPT
from qkv.training import Trainer, TrainingData
from qkv.training.gpt import next_token_objective
from qkv.training.run_folder import RunFolder
from qkv.weights.published_weights import load_published_weights


def build(work: Work, options: dict[str, Any]) -> Built:
    model = GPT(model_config(work)).train()
    load_published_weights(model, work.first_weights())
    model.to(work.device)
    training = TrainingConfig(
        steps=10**9,
        batch_size=work.batch,
        seq_len=work.length,
        learning_rate=work.learning_rate,
        schedule=ScheduleKind.CONSTANT,
        warmup_steps=0,
        weight_decay=work.weight_decay,
        beta1=work.beta1,
        beta2=work.beta2,
        max_grad_norm=work.clip,
        **options,
    )
    try:
        objective = next_token_objective(model, training)
    except ConfigError as error:
        raise MissingPeerError(str(error)) from None  # bfloat16 on a CPU that has no instruction for it
    losses: list[float] = []
    trainer = Trainer(
        model,
        training,
        objective=objective,
        data=TrainingData(batch=_no_batch),
        run=RunFolder(scratch_folder()),
        texts={},
        report=lambda entry: losses.append(entry["loss"]),
    )
    counts = torch.full((work.batch,), work.length)

    numbers = count()

    def step(ids: Tensor, targets: Tensor) -> int:
        trainer._step(TokenBatch(ids, targets, None, counts))  # noqa: SLF001 - one step alone has no public name
        return next(numbers)

    def read(number: int) -> float:
        trainer.flush_metrics()
        return losses[number]

    return Built(step=step, versions={"qkv": qkv.__version__}, read=read)


def model_config(work: Work) -> GPTConfig:
    return GPTConfig(
        vocab_size=work.vocab_size,
        context_length=work.context_length,
        d_model=work.d_model,
        n_heads=work.n_heads,
        n_layers=work.n_layers,
        attention_bias=work.bias,
        feed_forward_bias=work.bias,
        norm_bias=work.bias,
        activation=Activation.GELU,
    )


def _no_batch(t: int) -> TokenBatch:
    raise AssertionError(f"batch {t} was asked of the trainer; the benchmark gives it its batches")


if __name__ == "__main__":
    serve_training(build)
