"""Training workload shared by all engines, with the model shape, initial weights, batches and timing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, serve

N_BATCHES = 8
"""Number of batches that are kept in memory and used in turn, because reading text is not part of the timing."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A GPT-2 of any size with exact GELU and without dropout, and the settings of AdamW."""

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
    """Device for training. On a GPU, matmuls run in bfloat16."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    max_grad_norm: float = 1.0
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """The number of weights used in matmuls."""
        return 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model

    @property
    def flops_per_token(self) -> int:
        """The FLOPs per token: 6 per matmul weight, and 6·L·d·n for causal attention. Embedding lookups count as 0."""
        return 6 * self.n_weights + 6 * self.n_layers * self.d_model * self.length

    def initial_weights(self) -> dict[str, Tensor]:
        """Sample the initial weights, keyed by their names in the published GPT-2. Matrices have shape in × out.

        The weights depend only on the seed, so processes do not have to share a file.
        """
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
        """Sample batches of (ids, targets), each of shape batch × length."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.length + 1)
        drawn = [torch.randint(self.vocab_size, shape, generator=generator) for _ in range(N_BATCHES)]
        return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


Step = Callable[[Tensor, Tensor], Any]
"""Function that performs one full update on (ids, targets): loss, gradients, clipping and optimizer.

Both arguments are on the CPU. The function returns the loss, or a value that `TrainingEngine.read` converts to the loss
later, because reading the loss immediately would synchronize the GPU at every step.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingEngine:
    """A training engine with the initial weights of the workload."""

    step: Step
    versions: dict[str, str]
    read: Callable[[Any], float] = float
    """Function that converts the return value of a step to the loss. It is called after all steps have finished."""


def serve_training(build: Callable[[Workload, dict[str, object]], TrainingEngine]) -> None:
    """Serve an engine whose `build(workload, options)` returns a `TrainingEngine`."""
    state: dict[str, Any] = {}

    def describe(request: EngineRequest) -> EngineResponse:
        workload = Workload(**request["workload"])
        torch.set_num_threads(workload.threads)
        built = build(workload, request["options"])
        batches = workload.batches()
        if workload.device == "cuda":
            batches = [(ids.pin_memory(), targets.pin_memory()) for ids, targets in batches]
        state.update(workload=workload, built=built, batches=batches)
        return {"versions": {"torch": torch.__version__, **built.versions}}

    def steps(n: int) -> list[float]:
        built, batches = state["built"], state["batches"]
        outputs = [built.step(*batches[i % N_BATCHES]) for i in range(n)]
        if state["workload"].device == "cuda":
            torch.cuda.synchronize()
        return [built.read(output) for output in outputs]

    def measure(request: EngineRequest) -> EngineResponse:
        timer = ElapsedTimer()
        steps(request["steps"])
        return timer.elapsed()

    serve({"describe": describe, "check": lambda request: {"output": steps(request["steps"])}, "time": measure})
