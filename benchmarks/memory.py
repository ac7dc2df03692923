"""Compare the predicted and measured peak memory of training steps on a GPU or, for small models, on a CPU."""

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
from benchmarks.runner import BenchmarkOptions
from qkv.config import BERTConfig, GPTConfig, ModelConfig, TrainingConfig, preset
from qkv.cost import Workload
from qkv.cost.estimate import estimate_workload
from qkv.models import BERT, GPT, Seq2Seq, build
from qkv.nn import Blocks, use_attention_kernel
from qkv.training.objectives import chunked_loss_sum, cross_entropy_sum
from qkv.training.optimizer import EMA, build_optimizers

GPU_LIMIT, CPU_LIMIT = 0.05, 0.10
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to measure, with its model config and workload settings."""

    name: str
    config: ModelConfig
    settings: dict[str, Any] = field(default_factory=dict)
    """Workload settings that differ from those of a float32 step with AdamW."""

    def workload(self, device_type: str) -> Workload:
        return Workload.model_validate({"mode": "train", "device_type": device_type, **self.settings})


_MIXED = {"dtype": "mixed", "seq_len": 1024}
_LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "n_kv_heads": 4,
    "d_ff": 2048,
    "attention_bias": False,
    "feed_forward_bias": False,
}
GPU_CASES = (
    Case(name="GPT-2 124M", config=preset("gpt2"), settings={**_MIXED, "batch_size": 16}),
    Case(
        name="GPT-2 124M, chunked loss",
        config=preset("gpt2"),
        settings={**_MIXED, "batch_size": 32, "loss_chunk_size": 4096},
    ),
    Case(
        name="GPT-2 medium, checkpointing",
        config=preset("gpt2-medium"),
        settings={**_MIXED, "batch_size": 16, "activation_checkpointing": True, "loss_chunk_size": 2048},
    ),
    Case(
        name="BERT-base, 77 masked tokens per sequence",
        config=preset("bert-base", masked_lm_head=True, pooler=False),
        settings={"dtype": "mixed", "batch_size": 32, "seq_len": 512, "logits_to_keep": 77},
    ),
    Case(
        name="T5-small",
        config=preset("t5-small"),
        settings={"dtype": "mixed", "batch_size": 32, "seq_len": 128, "source_len": 512},
    ),
    Case(
        name="GPT-2 124M, float32, eager",
        config=preset("gpt2"),
        settings={"batch_size": 4, "seq_len": 1024, "kernel": "eager"},
    ),
    Case(
        name="Llama-like, Muon, EMA",
        config=preset("gpt2", **_LLAMA),
        settings={
            **_MIXED,
            "batch_size": 8,
            "loss_chunk_size": 1024,
            "optimizer": "muon",
            "ema": True,
            "accumulation_steps": 2,
        },
    ),
    Case(
        name="GPT-2 124M, one short sequence",
        config=preset("gpt2"),
        settings={"dtype": "mixed", "batch_size": 1, "seq_len": 64},
    ),
)

_SMALL = {"d_model": 96, "n_heads": 4, "n_layers": 4, "context_length": 256}
_T5 = preset("t5-small", d_model=64, n_heads=4, d_head=16, d_ff=200, vocab_size=1009)
_BERT = preset("bert-nano", masked_lm_head=True, pooler=False, vocab_size=1009)
CPU_CASES = (
    Case(name="gpt", config=preset("gpt2", vocab_size=5003, **_SMALL), settings={"batch_size": 4, "seq_len": 128}),
    Case(
        name="gpt, small vocabulary",
        config=preset("gpt2", vocab_size=101, **_SMALL),
        settings={"batch_size": 8, "seq_len": 128},
    ),
    Case(
        name="gpt, short", config=preset("gpt2", vocab_size=5003, **_SMALL), settings={"batch_size": 1, "seq_len": 32}
    ),
    Case(
        name="gpt, untied",
        config=preset("gpt2", vocab_size=5003, tie_embeddings=False, **_SMALL),
        settings={"batch_size": 1, "seq_len": 64},
    ),
    Case(
        name="gpt, eager",
        config=preset("gpt2", vocab_size=101, **_SMALL),
        settings={"batch_size": 4, "seq_len": 256, "kernel": "eager"},
    ),
    Case(
        name="gpt, chunked",
        config=preset("gpt2", vocab_size=5003, **_SMALL),
        settings={"batch_size": 8, "seq_len": 128, "loss_chunk_size": 128},
    ),
    Case(
        name="gpt, checkpointing, chunked",
        config=preset("gpt2", vocab_size=1009, **_SMALL),
        settings={"batch_size": 8, "seq_len": 128, "loss_chunk_size": 100, "activation_checkpointing": True},
    ),
    Case(
        name="gpt, Muon",
        config=preset("gpt2", vocab_size=101, **_SMALL),
        settings={"batch_size": 1, "seq_len": 16, "optimizer": "muon"},
    ),
    Case(
        name="gpt, EMA, accumulation",
        config=preset("gpt2", vocab_size=1009, **_SMALL),
        settings={"batch_size": 4, "seq_len": 128, "ema": True, "accumulation_steps": 2},
    ),
    Case(
        name="llama",
        config=preset("llama-nano", n_layers=4, vocab_size=503),
        settings={"batch_size": 8, "seq_len": 64},
    ),
    Case(name="bert", config=_BERT, settings={"batch_size": 8, "seq_len": 64, "logits_to_keep": 10}),
    Case(name="t5", config=_T5, settings={"batch_size": 4, "seq_len": 128, "source_len": 96}),
    Case(
        name="rnn",
        config=preset("rnn-nano", vocab_size=1009),
        settings={"batch_size": 8, "seq_len": 48, "source_len": 40},
    ),
)


class Step:
    """A full training step that, like the trainer's, computes loss, gradients, clipping, update and EMA."""

    def __init__(self, case: Case, device: str) -> None:
        self.workload = case.workload("cuda" if device == "cuda" else "cpu")
        self.device = device
        workload = self.workload
        self.model = build(case.config).to(device)
        if workload.activation_checkpointing:
            for module in self.model.modules():
                if isinstance(module, Blocks):
                    module.activation_checkpointing = True
        config = TrainingConfig(steps=1, batch_size=1, seq_len=1, optimizer=workload.optimizer, warmup_steps=0)
        self.optimizers = build_optimizers(self.model, config)
        self.ema = EMA(self.model, 0.9) if workload.ema else None
        vocab_size = case.config.vocab_size
        self.ids, self.targets = (
            torch.randint(vocab_size, (workload.batch_size, workload.seq_len), device=device) for _ in range(2)
        )
        self.source = None
        if not isinstance(case.config, GPTConfig | BERTConfig):
            self.source = torch.randint(vocab_size, (workload.batch_size, workload.n_source), device=device)

    def loss(self) -> Tensor:
        model, chunk = self.model, self.workload.loss_chunk_size
        if isinstance(model, GPT):
            return chunked_loss_sum(model.unembedding, model.hidden_states(self.ids), self.targets, chunk=chunk)
        if isinstance(model, BERT):
            n = self.workload.logits_to_keep or self.workload.seq_len
            return cross_entropy_sum(model.masked_lm_logits(model(self.ids)[:, :n]), self.targets[:, :n])
        assert self.source is not None
        if isinstance(model, Seq2Seq):
            states = model.hidden_states(self.ids, model.encode(self.source))
            return chunked_loss_sum(model.unembedding, states, self.targets, chunk=chunk)
        return cross_entropy_sum(model(self.source, self.ids), self.targets)

    def __call__(self) -> None:
        is_mixed = self.workload.dtype == "mixed"
        for _ in range(self.workload.accumulation_steps):
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=is_mixed):
                loss = self.loss()
            (loss / self.targets.numel()).backward()
        parameters = [tensor for tensor in self.model.parameters() if tensor.grad is not None]
        norm = get_total_norm([tensor.grad for tensor in parameters if tensor.grad is not None], foreach=True)
        clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(1)

    def persistent_bytes(self) -> int:
        """Return the number of bytes that are in memory before and after a step."""
        tensors: list[Tensor] = [*self.model.parameters(), self.ids, self.targets]
        tensors += [] if self.source is None else [self.source]
        tensors += [] if self.ema is None else [*self.ema.weights.values()]
        states = [state for tensor in self.optimizers for state in tensor.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure_peak(case: Case, device: str) -> int:
    """Return the peak memory in bytes of a training step other than the first."""
    step = Step(case, device)
    with use_attention_kernel(step.model, step.workload.kernel):
        step()
        if device == "cuda":
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return step.persistent_bytes() + peak_cpu_bytes(step)


def peak_cpu_bytes(run: Callable[[], object]) -> int:
    """Return the peak number of bytes allocated while a function runs on a CPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise, the profiler prints to stderr when it starts and ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler prints warnings
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, live)
    return peak


def predict_peak(case: Case, device: str) -> int:
    return estimate_workload(case.config, case.workload("cuda" if device == "cuda" else "cpu")).memory.peak


def memory(options: BenchmarkOptions) -> Report:
    load = machine.load_average()
    on_gpu = options.device == "cuda"
    device, cases, limit = ("cuda", GPU_CASES, GPU_LIMIT) if on_gpu else ("cpu", CPU_CASES, CPU_LIMIT)
    rows, notes, errors = [], [], []
    for case in cases:
        options.log(case.name)
        actual, estimated = measure_peak(case, device), predict_peak(case, device)
        gc.collect()
        errors.append(estimated / actual - 1)
        rows.append([case.name, f"{actual / MIB:,.1f}", f"{estimated / MIB:,.1f}", f"{errors[-1]:+.1%}"])
        if abs(errors[-1]) > limit:
            notes.append(f"Failed: {case.name}: the error is {errors[-1]:+.1%}, expected at most {limit:.0%}.")
    sizes = [abs(error) for error in errors]
    notes.insert(
        0, f"Mean error {sum(sizes) / len(sizes):.1%}, worst error {max(sizes):.1%}; target: at most {limit:.0%}."
    )
    if on_gpu:
        left = torch.cuda.memory_allocated() / MIB
        notes.append(
            f"Device: {torch.cuda.get_device_name()}. PyTorch still holds {left:.0f} MiB after all models are deleted."
        )
    return Report(
        name="memory",
        description=f"Measured and predicted peak memory of a training step on {'a GPU' if on_gpu else 'a CPU'}.",
        columns=["step", "measured MiB", "predicted MiB", "error"],
        rows=rows,
        notes=notes,
        versions={"torch": torch.__version__},
        load=load,
    )
