"""The same training work for every engine: a shape, its first weights, its batches, and how steps are timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve

N_BATCHES = 8
"""Batches in memory, used in turn: reading text is not what is timed here."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A GPT-2 of any size, exact GELU, no dropout, and the AdamW that trains it."""

    n_layers: int
    n_heads: int
    d_model: int
    vocab_size: int
    context_length: int
    bias: bool
    batch: int
    length: int
    threads: int
    device: str = "cpu"
    """Where it is trained; on a GPU products run in bfloat16, as each engine does that."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """Those that multiply."""
        return 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model

    @property
    def flops_a_token(self) -> int:
        """6 for each weight that multiplies, 6·L·d·n for causal attention; embeddings are looked up, not multiplied."""
        return 6 * self.n_weights + 6 * self.n_layers * self.d_model * self.length

    def first_weights(self) -> dict[str, Tensor]:
        """By GPT-2's published names, matrices in × out; a pure function of the seed, so no file is passed on."""
        generator = torch.Generator().manual_seed(self.seed)
        d, drawn = self.d_model, {}

        def draw(name: str, *shape: int) -> None:
            drawn[f"{name}.weight"] = torch.empty(shape).normal_(std=0.02, generator=generator)
            if self.bias and len(shape) == 2 and ".h." in name:
                drawn[f"{name}.bias"] = torch.zeros(shape[1])

        def norm(name: str) -> None:
            drawn[f"{name}.weight"] = torch.ones(d)
            if self.bias:
                drawn[f"{name}.bias"] = torch.zeros(d)

        draw("transformer.wte", self.vocab_size, d)
        draw("transformer.wpe", self.context_length, d)
        for i in range(self.n_layers):
            block = f"transformer.h.{i}"
            draw(f"{block}.attn.c_attn", d, 3 * d)
            draw(f"{block}.attn.c_proj", d, d)
            draw(f"{block}.mlp.c_fc", d, 4 * d)
            draw(f"{block}.mlp.c_proj", 4 * d, d)
            norm(f"{block}.ln_1")
            norm(f"{block}.ln_2")
        norm("transformer.ln_f")
        return drawn

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """(ids, targets), each batch × length."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.length + 1)
        drawn = [torch.randint(self.vocab_size, shape, generator=generator) for _ in range(N_BATCHES)]
        return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


Step = Callable[[Tensor, Tensor], Any]
"""One whole update on (ids, targets), both on the CPU: loss, gradients, clipping, optimizer.

Returns the loss, or what `Built.read` makes it of: on a GPU reading it at once would make each step wait.
"""


@dataclass(frozen=True, kw_only=True)
class Built:
    """An engine with the work's first weights, ready for its first step."""

    step: Step
    versions: dict[str, str]
    read: Callable[[Any], float] = float
    """From what a step returned to its loss; called when all steps were made."""


def serve_training(build: Callable[[Work, dict[str, object]], Built]) -> None:
    """`build(work, options)`: the engine's own part; all the rest is the same for all."""
    state: dict[str, Any] = {}

    def describe(question: Question) -> Answer:
        work = Work(**question["work"])
        torch.set_num_threads(work.threads)
        built = build(work, question["options"])
        batches = work.batches()
        if work.device == "cuda":
            batches = [(ids.pin_memory(), targets.pin_memory()) for ids, targets in batches]
        state.update(work=work, built=built, batches=batches)
        return {"versions": {"torch": torch.__version__, **built.versions}}

    def steps(n: int) -> list[float]:
        built, batches = state["built"], state["batches"]
        made = [built.step(*batches[i % N_BATCHES]) for i in range(n)]
        if state["work"].device == "cuda":
            torch.cuda.synchronize()
        return [built.read(one) for one in made]

    def measure(question: Question) -> Answer:
        watch = Stopwatch()
        steps(question["steps"])
        return watch.read()

    serve({"describe": describe, "check": lambda question: {"output": steps(question["steps"])}, "time": measure})
