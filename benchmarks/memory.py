"""The most memory a training step holds, predicted from the config and measured: on a GPU, or small on this CPU."""

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks import machine
from benchmarks.results import Report
from benchmarks.runner import Asked
from qkv.config import BERTConfig, GPTConfig, ModelConfig, TrainingConfig, preset
from qkv.cost import Workload
from qkv.cost.estimate import estimate_of
from qkv.models import BERT, GPT, Seq2Seq, build
from qkv.nn import using
from qkv.training.averaging import Averaged
from qkv.training.losses import cross_entropy_sum, unembedded_loss_sum
from qkv.training.optimizer import build_optimizers
from qkv.training.recompute import recompute_blocks

GPU_LIMIT, CPU_LIMIT = 0.05, 0.10
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step."""

    name: str
    config: ModelConfig
    work: dict[str, Any] = field(default_factory=dict)
    """What differs from a float32 step of AdamW."""

    def workload(self, backend: str) -> Workload:
        return Workload.model_validate({"mode": "train", "backend": backend, **self.work})


_MIXED = {"dtype": "mixed", "length": 1024}
_LLAMA = {
    "positions": "rotary", "norm": "rms", "gated": True, "activation": "silu", "n_kv_heads": 4, "d_ff": 2048,
    "attention_bias": False, "feed_forward_bias": False,
}  # fmt: skip
ON_GPU = (
    Case(name="GPT-2 124M", config=preset("gpt2"), work={**_MIXED, "batch": 16}),
    Case(name="GPT-2 124M, chunked loss", config=preset("gpt2"), work={**_MIXED, "batch": 32, "loss_chunk": 4096}),
    Case(
        name="GPT-2 medium, checkpointing",
        config=preset("gpt2-medium"),
        work={**_MIXED, "batch": 16, "checkpointing": True, "loss_chunk": 2048},
    ),
    Case(
        name="BERT-base, 77 masked words a row",
        config=preset("bert-base", masked_word_head=True, pooler=False),
        work={"dtype": "mixed", "batch": 32, "length": 512, "predictions": 77},
    ),
    Case(
        name="T5-small",
        config=preset("t5-small"),
        work={"dtype": "mixed", "batch": 32, "length": 128, "source_length": 512},
    ),
    Case(
        name="GPT-2 124M, float32, plain",
        config=preset("gpt2"),
        work={"batch": 4, "length": 1024, "kernel": "plain"},
    ),
    Case(
        name="Llama-like, Muon, averaged",
        config=preset("gpt2", **_LLAMA),
        work={**_MIXED, "batch": 8, "loss_chunk": 1024, "optimizer": "muon", "averaging": True, "accumulation": 2},
    ),
    Case(name="GPT-2 124M, one short row", config=preset("gpt2"), work={"dtype": "mixed", "batch": 1, "length": 64}),
)

_SMALL = {"d_model": 96, "n_heads": 4, "n_layers": 4, "context_length": 256}
_T5 = preset("t5-small", d_model=64, n_heads=4, d_head=16, d_ff=200, vocab_size=1009)
_BERT = preset("bert-nano", masked_word_head=True, pooler=False, vocab_size=1009)
ON_CPU = (
    Case(name="gpt", config=preset("gpt2", vocab_size=5003, **_SMALL), work={"batch": 4, "length": 128}),
    Case(name="gpt, few words", config=preset("gpt2", vocab_size=101, **_SMALL), work={"batch": 8, "length": 128}),
    Case(name="gpt, short", config=preset("gpt2", vocab_size=5003, **_SMALL), work={"batch": 1, "length": 32}),
    Case(
        name="gpt, untied",
        config=preset("gpt2", vocab_size=5003, tie_embeddings=False, **_SMALL),
        work={"batch": 1, "length": 64},
    ),
    Case(
        name="gpt, plain",
        config=preset("gpt2", vocab_size=101, **_SMALL),
        work={"batch": 4, "length": 256, "kernel": "plain"},
    ),
    Case(
        name="gpt, chunked",
        config=preset("gpt2", vocab_size=5003, **_SMALL),
        work={"batch": 8, "length": 128, "loss_chunk": 128},
    ),
    Case(
        name="gpt, checkpointing, chunked",
        config=preset("gpt2", vocab_size=1009, **_SMALL),
        work={"batch": 8, "length": 128, "loss_chunk": 100, "checkpointing": True},
    ),
    Case(
        name="gpt, Muon",
        config=preset("gpt2", vocab_size=101, **_SMALL),
        work={"batch": 1, "length": 16, "optimizer": "muon"},
    ),
    Case(
        name="gpt, averaged, accumulated",
        config=preset("gpt2", vocab_size=1009, **_SMALL),
        work={"batch": 4, "length": 128, "averaging": True, "accumulation": 2},
    ),
    Case(
        name="llama",
        config=preset("llama-nano", n_layers=4, vocab_size=503),
        work={"batch": 8, "length": 64},
    ),
    Case(name="bert", config=_BERT, work={"batch": 8, "length": 64, "predictions": 10}),
    Case(name="t5", config=_T5, work={"batch": 4, "length": 128, "source_length": 96}),
    Case(
        name="rnn",
        config=preset("rnn-nano", vocab_size=1009),
        work={"batch": 8, "length": 48, "source_length": 40},
    ),
)


class Step:
    """A whole training step as the trainer makes it: loss, gradients, clipping, update, average."""

    def __init__(self, case: Case, device: str) -> None:
        self.work = case.workload("cuda" if device == "cuda" else "cpu")
        self.device = device
        work = self.work
        self.model = build(case.config).to(device)
        if work.checkpointing:
            recompute_blocks(self.model)
        config = TrainingConfig(steps=1, batch_size=1, seq_len=1, optimizer=work.optimizer, warmup_steps=0)
        self.optimizers = build_optimizers(self.model, config)
        self.averaged = Averaged(self.model, 0.9) if work.averaging else None
        words = case.config.vocab_size
        self.ids, self.targets = (torch.randint(words, (work.batch, work.length), device=device) for _ in range(2))
        self.source = None
        if not isinstance(case.config, GPTConfig | BERTConfig):
            self.source = torch.randint(words, (work.batch, work.n_source), device=device)

    def loss(self) -> Tensor:
        model, chunk = self.model, self.work.loss_chunk
        if isinstance(model, GPT):
            return unembedded_loss_sum(model.unembedding, model.states(self.ids), self.targets, chunk=chunk)
        if isinstance(model, BERT):
            n = self.work.predictions or self.work.length
            return cross_entropy_sum(model.masked_word_logits(model(self.ids)[:, :n]), self.targets[:, :n])
        assert self.source is not None
        if isinstance(model, Seq2Seq):
            states = model.states(self.ids, model.encode(self.source))
            return unembedded_loss_sum(model.unembedding, states, self.targets, chunk=chunk)
        return cross_entropy_sum(model(self.source, self.ids), self.targets)

    def __call__(self) -> None:
        is_mixed = self.work.dtype == "mixed"
        for _ in range(self.work.accumulation):
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=is_mixed):
                loss = self.loss()
            (loss / self.targets.numel()).backward()
        parameters = [one for one in self.model.parameters() if one.grad is not None]
        norm = get_total_norm([one.grad for one in parameters if one.grad is not None], foreach=True)
        clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.averaged is not None:
            self.averaged.update(1)

    def standing(self) -> int:
        """Bytes that are there before and after a step."""
        tensors: list[Tensor] = [*self.model.parameters(), self.ids, self.targets]
        tensors += [] if self.source is None else [self.source]
        tensors += [] if self.averaged is None else [*self.averaged.weights.values()]
        states = [state for one in self.optimizers for state in one.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(one.numel() * one.element_size() for one in tensors)


def measured(case: Case, device: str) -> int:
    """The most bytes torch held in a step that is not the first."""
    step = Step(case, device)
    with using(step.model, step.work.kernel):
        step()
        if device == "cuda":
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return step.standing() + most_on_cpu(step)


def most_on_cpu(work: Callable[[], object]) -> int:
    """Bytes that were taken and not given back at the worst moment of the work."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells standard error when it begins and ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            most = max(most, held)
    return most


def predicted(case: Case, device: str) -> int:
    return estimate_of(case.config, case.workload("cuda" if device == "cuda" else "cpu")).memory.peak


def memory(asked: Asked) -> Report:
    load = machine.others_load()
    on_gpu = asked.device == "cuda"
    device, cases, limit = ("cuda", ON_GPU, GPU_LIMIT) if on_gpu else ("cpu", ON_CPU, CPU_LIMIT)
    rows, notes, errors = [], [], []
    for case in cases:
        asked.say(case.name)
        real, ours = measured(case, device), predicted(case, device)
        gc.collect()
        errors.append(ours / real - 1)
        rows.append([case.name, f"{real / MIB:,.1f}", f"{ours / MIB:,.1f}", f"{errors[-1]:+.1%}"])
        if abs(errors[-1]) > limit:
            notes.append(f"Failed: {case.name}: off by {errors[-1]:+.1%}, more than {limit:.0%}.")
    sizes = [abs(error) for error in errors]
    notes.insert(0, f"Mean error {sum(sizes) / len(sizes):.1%}, the worst {max(sizes):.1%}; aimed at: {limit:.0%}.")
    if on_gpu:
        left = torch.cuda.memory_allocated() / MIB
        notes.append(f"On {torch.cuda.get_device_name()}; with all models gone torch still holds {left:.0f} MiB.")
    return Report(
        name="memory",
        what=f"The most memory a training step holds on {'a GPU' if on_gpu else 'a CPU'}, measured and predicted.",
        columns=["step", "measured MiB", "predicted MiB", "error"],
        rows=rows,
        notes=notes,
        versions={"torch": torch.__version__},
        load=load,
    )
